//! The node of this launcher, from the environment. One launcher on each node supervises its ranks.
//!
//! Schedulers tell each process its number and their count, each in its own variables. The
//! scheduler that started this process directly is authoritative; an outer one counts something
//! else. Variables set by users or Kubernetes must agree with it.

use std::env;
use std::fmt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;
use spd_checkpoint::atomic::write_file;

/// The node of this launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    /// Number of this node, from 0.
    pub(crate) index: u64,
    /// Nodes of the run.
    pub(crate) count: u64,
    /// The variables with these numbers; `None` if none is set, and there is one node.
    source: Option<VariablePair>,
}

/// A pair of variables and their values.
#[derive(Debug, Clone, PartialEq, Eq)]
struct VariablePair {
    index: &'static str,
    count: &'static str,
}

/// A scheduler that starts processes.
struct Engine {
    name: &'static str,
    /// Set in processes that it started.
    marker: &'static str,
    index: &'static str,
    count: &'static str,
    /// The number of processes that it starts on this node.
    on_node: &'static str,
    /// The command with one process on each node.
    one_a_node: &'static str,
}

/// The innermost first: each may be started by one that follows.
const ENGINES: [Engine; 4] = [
    Engine {
        name: "torchrun",
        marker: "TORCHELASTIC_RUN_ID",
        index: "RANK",
        count: "WORLD_SIZE",
        on_node: "LOCAL_WORLD_SIZE",
        one_a_node: "--nproc-per-node=1",
    },
    Engine {
        name: "Open MPI",
        marker: "OMPI_COMM_WORLD_RANK",
        index: "OMPI_COMM_WORLD_RANK",
        count: "OMPI_COMM_WORLD_SIZE",
        on_node: "OMPI_COMM_WORLD_LOCAL_SIZE",
        one_a_node: "mpirun -N 1",
    },
    Engine {
        name: "MPI",
        marker: "MPI_LOCALNRANKS",
        index: "PMI_RANK",
        count: "PMI_SIZE",
        on_node: "MPI_LOCALNRANKS",
        one_a_node: "mpiexec -ppn 1",
    },
    Engine {
        name: "Slurm",
        // A batch script also has the other variables, but is not a task.
        marker: "SLURM_STEP_ID",
        index: "SLURM_PROCID",
        count: "SLURM_STEP_NUM_TASKS",
        on_node: "SLURM_STEP_TASKS_PER_NODE",
        one_a_node: "srun --ntasks-per-node=1",
    },
];

/// Pairs that are set by Kubernetes, Kubeflow or users.
const DECLARED: [VariablePair; 3] = [
    VariablePair {
        index: "PET_NODE_RANK",
        count: "PET_NNODES",
    },
    VariablePair {
        index: "JOB_COMPLETION_INDEX",
        count: "WORLD_SIZE",
    },
    VariablePair {
        index: "RANK",
        count: "WORLD_SIZE",
    },
];

/// The file in which torchrun looks for the error of a failed process, to show it as the root
/// cause.
const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";

/// Reports the failure of this process to torchrun, if that started it, in the format of Python's
/// `record`.
pub(crate) fn tell_torchrun(line: &str) {
    if let Some(path) = env::var_os(ERROR_FILE) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let seconds = now.map_or(0, |now| now.as_secs()).to_string();
        let extra = json!({"py_callstack": line, "timestamp": seconds});
        let text = json!({"message": {"message": line, "extraInfo": extra}}).to_string();
        // If it cannot be written, torchrun still sees the exit code.
        let _ = write_file(Path::new(&path), text.as_bytes());
    }
}

/// All variables that are read or set here; the launcher unsets them for its ranks before it sets
/// theirs.
pub(crate) fn variables() -> impl Iterator<Item = &'static str> {
    let engines = ENGINES.iter();
    let engines = engines.flat_map(|e| [e.marker, e.index, e.count, e.on_node]);
    let declared = DECLARED.iter().flat_map(|pair| [pair.index, pair.count]);
    engines.chain(declared).chain([ERROR_FILE])
}

impl Node {
    /// The node according to the environment.
    ///
    /// # Errors
    ///
    /// One line, when a variable is not a number or its partner is missing, when several processes
    /// were started on this node, or when two pairs disagree.
    pub(crate) fn from_env() -> Result<Self, String> {
        Self::from_variables(|key| env::var(key).ok())
    }

    /// The variables for rank `rank` of `ranks`, which is number `local` on its node. Ranks find
    /// each other in another way, so address and port are dummies.
    pub(crate) fn environment(
        rank: usize,
        local: usize,
        ranks: usize,
    ) -> [(&'static str, String); 5] {
        [
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", local.to_string()),
            ("WORLD_SIZE", ranks.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", "0".to_owned()),
        ]
    }

    /// The node of a launcher that must be the only one.
    ///
    /// # Errors
    ///
    /// As [`Self::from_env`], and when it is one of several.
    pub(crate) fn only() -> Result<Self, String> {
        let node = Self::from_env()?;
        if node.count > 1 {
            return Err(format!(
                "{node}: several runs at once share the cores of one node; start one launcher"
            ));
        }
        Ok(node)
    }

    /// The first of `count` nodes, for a plan.
    pub(crate) fn planned(count: u64) -> Self {
        Self {
            index: 0,
            count,
            source: None,
        }
    }

    /// Nodes of the run.
    pub(crate) fn nodes(&self) -> usize {
        usize::try_from(self.count).unwrap_or(usize::MAX)
    }

    /// Number of this node.
    pub(crate) fn place(&self) -> usize {
        usize::try_from(self.index).unwrap_or(usize::MAX)
    }

    /// Whether this is the first launcher, which decides.
    pub(crate) fn is_first(&self) -> bool {
        self.index == 0
    }

    /// The variables with these numbers, and their values, if any.
    pub(crate) fn derivation(&self) -> Option<String> {
        self.source.as_ref().map(|_| self.to_string())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let engine = ENGINES.iter().find(|e| variable(e.marker).is_some());
        let mut found = engine.map(|engine| engine.node(&variable)).transpose()?;
        // Pairs that the scheduler sets itself add nothing.
        let own = engine.map(|engine| engine.index);
        for pair in DECLARED.iter().filter(|pair| Some(pair.index) != own) {
            let declared = match (variable(pair.index), variable(pair.count)) {
                (Some(_), Some(_)) => pair.node(&variable)?,
                (Some(index), None) => return Err(lonely(pair.index, &index, pair.count)),
                (None, None) => continue,
                (None, Some(count)) => {
                    // Scripts count ranks with it where something else numbers the nodes.
                    let is_nothing = found.is_some() || count.trim() == "1";
                    if is_nothing || pair.index == "JOB_COMPLETION_INDEX" {
                        continue;
                    }
                    return Err(lonely(pair.count, &count, pair.index));
                }
            };
            match &found {
                Some(first) if (first.index, first.count) != (declared.index, declared.count) => {
                    return Err(format!(
                        "{first} and {declared} disagree; unset the wrong pair"
                    ));
                }
                Some(_) => {}
                None => found = Some(declared),
            }
        }
        Ok(found.unwrap_or(Self::planned(1)))
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) => write!(
                f,
                "{}={} of {}={}",
                source.index, self.index, source.count, self.count
            ),
            None => f.write_str("the only one"),
        }
    }
}

impl Engine {
    fn node(&self, variable: &impl Fn(&str) -> Option<String>) -> Result<Node, String> {
        let (index, count) = (self.index, self.count);
        let node = VariablePair { index, count }.node(variable)?;
        // Slurm writes `1(x4)` for four nodes, and `2,1` if nodes differ.
        let on_node = variable(self.on_node).unwrap_or_default();
        let is_one = on_node
            .split(',')
            .all(|nodes| matches!(nodes.split('(').next(), Some("1" | "")));
        if is_one || node.count == 1 {
            return Ok(node);
        }
        Err(format!(
            "{}={on_node}: {} starts several processes on a node, but one launcher supervises all ranks of a node; start one for each node ({})",
            self.on_node, self.name, self.one_a_node
        ))
    }
}

impl VariablePair {
    fn node(&self, variable: &impl Fn(&str) -> Option<String>) -> Result<Node, String> {
        let value = |key: &'static str, other: &'static str| match variable(key) {
            Some(value) => number(key, &value),
            None => Err(lonely(other, &variable(other).unwrap_or_default(), key)),
        };
        let index = value(self.index, self.count)?;
        let count = value(self.count, self.index)?;
        if index >= count {
            return Err(format!(
                "{}={index} is not below {}={count}; numbers start at 0",
                self.index, self.count
            ));
        }
        Ok(Node {
            index,
            count,
            source: Some(self.clone()),
        })
    }
}

fn number(key: &str, value: &str) -> Result<u64, String> {
    value
        .trim()
        .parse()
        .map_err(|_| format!("{key}={value} is not a whole number of at least 0"))
}

fn lonely(present: &str, value: &str, absent: &str) -> String {
    format!("{present}={value} is set and {absent} is not; set both or neither")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(variables: &[(&str, &str)]) -> Result<Node, String> {
        Node::from_variables(|key| {
            let found = variables.iter().find(|(name, _)| *name == key);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    /// The node and the derivation.
    fn place(variables: &[(&str, &str)]) -> (u64, u64, Option<String>) {
        let node = node(variables).unwrap();
        (node.index, node.count, node.derivation())
    }

    // Values of torchrun 2.15, Open MPI 4.1.4 and Slurm 22.05; MPICH's and Kubernetes' are from
    // their documentation.
    const TORCHRUN: [(&str, &str); 4] = [
        ("TORCHELASTIC_RUN_ID", "none"),
        ("RANK", "2"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_WORLD_SIZE", "1"),
    ];
    const OPEN_MPI: [(&str, &str); 3] = [
        ("OMPI_COMM_WORLD_RANK", "2"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
    ];
    const MPICH: [(&str, &str); 3] = [
        ("PMI_RANK", "2"),
        ("PMI_SIZE", "4"),
        ("MPI_LOCALNRANKS", "1"),
    ];
    const SRUN: [(&str, &str); 5] = [
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "2"),
        ("SLURM_STEP_NUM_TASKS", "4"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x4)"),
    ];
    const BATCH: [(&str, &str); 4] = [
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_TASKS_PER_NODE", "1(x4)"),
        ("SLURM_NODEID", "0"),
    ];
    const PET: [(&str, &str); 3] = [
        ("PET_NODE_RANK", "2"),
        ("PET_NNODES", "4"),
        ("PET_NPROC_PER_NODE", "8"),
    ];

    #[test]
    fn every_scheduler_is_recognised() {
        assert_eq!(place(&[]), (0, 1, None));
        for (variables, derivation) in [
            (&TORCHRUN[..], "RANK=2 of WORLD_SIZE=4"),
            (
                &OPEN_MPI,
                "OMPI_COMM_WORLD_RANK=2 of OMPI_COMM_WORLD_SIZE=4",
            ),
            (&MPICH, "PMI_RANK=2 of PMI_SIZE=4"),
            (&SRUN, "SLURM_PROCID=2 of SLURM_STEP_NUM_TASKS=4"),
            (&PET, "PET_NODE_RANK=2 of PET_NNODES=4"),
            (
                &[("JOB_COMPLETION_INDEX", "2"), ("WORLD_SIZE", "4")],
                "JOB_COMPLETION_INDEX=2 of WORLD_SIZE=4",
            ),
            (
                &[("RANK", "2"), ("WORLD_SIZE", "4")],
                "RANK=2 of WORLD_SIZE=4",
            ),
        ] {
            assert_eq!(place(variables), (2, 4, Some(derivation.to_owned())));
        }
    }

    #[test]
    fn the_inner_scheduler_is_authoritative() {
        // A job step that starts two agents, or mpirun's daemons, has other counts.
        let outer = [
            ("SLURM_STEP_ID", "1"),
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "3"),
        ];
        for inner in [&TORCHRUN[..], &OPEN_MPI, &MPICH] {
            assert_eq!(place(&[inner, &outer[..]].concat()).0, 2);
            assert_eq!(place(&[inner, &BATCH[..]].concat()).0, 2);
        }
        assert_eq!(place(&[&TORCHRUN[..], &PET].concat()).0, 2);
    }

    #[test]
    fn a_batch_script_is_not_a_task() {
        assert_eq!(place(&BATCH), (0, 1, None));
        // A script may set it to the number of ranks before srun numbers them.
        let counted = [&SRUN[..], &[("WORLD_SIZE", "32")]].concat();
        assert_eq!(place(&counted).1, 4);
        assert_eq!(place(&[("WORLD_SIZE", "1")]), (0, 1, None));
    }

    #[test]
    fn a_disagreement_names_both_pairs() {
        let both = [&SRUN[..], &[("RANK", "0"), ("WORLD_SIZE", "4")]].concat();
        assert_eq!(
            node(&both).unwrap_err(),
            "SLURM_PROCID=2 of SLURM_STEP_NUM_TASKS=4 and RANK=0 of WORLD_SIZE=4 disagree; \
             unset the wrong pair"
        );
        let both = [&PET[..], &[("RANK", "2"), ("WORLD_SIZE", "32")]].concat();
        assert_eq!(
            node(&both).unwrap_err(),
            "PET_NODE_RANK=2 of PET_NNODES=4 and RANK=2 of WORLD_SIZE=32 disagree; \
             unset the wrong pair"
        );
        let agreeing = [&SRUN[..], &[("RANK", "2"), ("WORLD_SIZE", "4")]].concat();
        assert_eq!(place(&agreeing).0, 2);
    }

    #[test]
    fn several_launchers_on_a_node_are_refused() {
        for (engine, on_node, help) in [
            (
                &TORCHRUN[..],
                ("LOCAL_WORLD_SIZE", "4"),
                "--nproc-per-node=1",
            ),
            (
                &OPEN_MPI,
                ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
                "mpirun -N 1",
            ),
            (
                &SRUN,
                ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
                "srun --ntasks-per-node=1",
            ),
            (
                &SRUN,
                ("SLURM_STEP_TASKS_PER_NODE", "1(x2),2"),
                "srun --ntasks-per-node=1",
            ),
        ] {
            let refused = node(&[&[on_node], engine].concat()).unwrap_err();
            let start = format!("{}={}: ", on_node.0, on_node.1);
            assert!(
                refused.starts_with(&start) && refused.ends_with(&format!("({help})")),
                "{refused}"
            );
        }
    }

    #[test]
    fn incomplete_pairs_and_invalid_numbers_are_refused() {
        for (variables, expected) in [
            (
                &[("RANK", "7")][..],
                "RANK=7 is set and WORLD_SIZE is not; set both or neither",
            ),
            (
                &[("WORLD_SIZE", "4")],
                "WORLD_SIZE=4 is set and RANK is not; set both or neither",
            ),
            (
                &[("JOB_COMPLETION_INDEX", "3")],
                "JOB_COMPLETION_INDEX=3 is set and WORLD_SIZE is not; set both or neither",
            ),
            (
                &[("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "1")],
                "SLURM_PROCID=1 is set and SLURM_STEP_NUM_TASKS is not; set both or neither",
            ),
            (
                &[("RANK", "one"), ("WORLD_SIZE", "2")],
                "RANK=one is not a whole number of at least 0",
            ),
            (
                &[("RANK", "2"), ("WORLD_SIZE", "2")],
                "RANK=2 is not below WORLD_SIZE=2; numbers start at 0",
            ),
        ] {
            assert_eq!(node(variables).unwrap_err(), expected);
        }
    }
}
