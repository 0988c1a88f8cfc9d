//! Who am I? Rank and world size, in the dialect of whoever started this process.

use std::env;

/// A process's place among all of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct World {
    /// Number of this process, from 0.
    pub(crate) rank: u64,
    /// Processes of the run.
    pub(crate) size: u64,
}

/// A pair of variables that says the same as `RANK` and `WORLD_SIZE`.
struct Dialect {
    rank: &'static str,
    size: &'static str,
}

const DIALECTS: [Dialect; 4] = [
    Dialect {
        rank: "RANK",
        size: "WORLD_SIZE",
    },
    Dialect {
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
    },
    Dialect {
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
    },
    Dialect {
        rank: "PET_NODE_RANK",
        size: "PET_NNODES",
    },
];

/// Set by torchrun. Its agent runs inside a task of Slurm or MPI and starts the ranks, so where it is
/// set `RANK` is right and the task's own numbers count agents.
const TORCHRUN: &str = "TORCHELASTIC_RUN_ID";

/// Processes of a node under `PET_NNODES` nodes.
const PET_PER_NODE: &str = "PET_NPROC_PER_NODE";

/// Every variable that is read here: the launcher takes them away from its ranks before it sets its own.
pub(crate) const KEYS: [&str; 10] = [
    "RANK",
    "WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PET_NODE_RANK",
    "PET_NNODES",
    PET_PER_NODE,
    TORCHRUN,
];

impl World {
    /// One process.
    pub(crate) const ALONE: Self = Self { rank: 0, size: 1 };

    /// The place that the environment names; alone when it names none.
    ///
    /// # Errors
    ///
    /// One line, when a variable holds no number or lacks its partner, or two sources contradict each
    /// other.
    pub(crate) fn from_env() -> Result<Self, String> {
        Self::from_variables(|key| env::var(key).ok())
    }

    /// What a launcher sets for this rank. One process meets no other, so the port is left open.
    pub(crate) fn environment(self) -> [(&'static str, String); 5] {
        [
            ("RANK", self.rank.to_string()),
            ("LOCAL_RANK", self.rank.to_string()),
            ("WORLD_SIZE", self.size.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", "0".to_owned()),
        ]
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let heard = if variable(TORCHRUN).is_some() {
            &DIALECTS[..1]
        } else {
            &DIALECTS[..]
        };
        let mut found: Option<(Self, &Dialect)> = None;
        for dialect in heard {
            let Some(world) = dialect.read(&variable)? else {
                continue;
            };
            match found {
                Some((first, source)) if first != world => {
                    return Err(format!(
                        "{}={} of {}={} contradicts {}={} of {}={}; unset the pair that is not meant",
                        source.rank,
                        first.rank,
                        source.size,
                        first.size,
                        dialect.rank,
                        world.rank,
                        dialect.size,
                        world.size
                    ));
                }
                Some(_) => {}
                None => found = Some((world, dialect)),
            }
        }
        Ok(found.map_or(Self::ALONE, |(world, _)| world))
    }
}

impl Dialect {
    fn read(&self, variable: &impl Fn(&str) -> Option<String>) -> Result<Option<World>, String> {
        let (rank, size) = match (variable(self.rank), variable(self.size)) {
            (None, None) => return Ok(None),
            (Some(rank), Some(size)) => (number(self.rank, &rank)?, number(self.size, &size)?),
            // A Slurm allocation names its tasks where none was started yet.
            (None, Some(_)) if self.size == "SLURM_NTASKS" => return Ok(None),
            (Some(_), None) => return Err(lonely(self.rank, self.size)),
            (None, Some(_)) => return Err(lonely(self.size, self.rank)),
        };
        if self.size == "PET_NNODES"
            && let Some(per_node) = variable(PET_PER_NODE)
            && number(PET_PER_NODE, &per_node)? != 1
        {
            return Err(format!(
                "{PET_PER_NODE}={per_node} asks for several processes a node and none of them is \
                 numbered; set RANK and WORLD_SIZE"
            ));
        }
        if rank >= size {
            let (rank_key, size_key) = (self.rank, self.size);
            return Err(format!(
                "{rank_key}={rank} is not below {size_key}={size}; ranks count from 0"
            ));
        }
        Ok(Some(World { rank, size }))
    }
}

fn number(key: &str, value: &str) -> Result<u64, String> {
    value
        .parse()
        .map_err(|_| format!("{key}={value} is no whole number from 0 on"))
}

fn lonely(present: &str, absent: &str) -> String {
    format!("{present} is set and {absent} is not; set both or neither")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(variables: &[(&str, &str)]) -> Result<World, String> {
        World::from_variables(|key| {
            variables
                .iter()
                .find(|(name, _)| *name == key)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn every_dialect_is_understood() {
        assert_eq!(world(&[]), Ok(World::ALONE));
        for dialect in DIALECTS {
            let answer = world(&[(dialect.rank, "11"), (dialect.size, "12")]);
            assert_eq!(answer, Ok(World { rank: 11, size: 12 }));
        }
    }

    #[test]
    fn sources_that_agree_are_one() {
        let agreeing = [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "2"),
        ];
        assert_eq!(world(&agreeing), Ok(World { rank: 1, size: 2 }));
    }

    #[test]
    fn a_contradiction_names_both_sources() {
        let contradicting = [
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "4"),
        ];
        assert_eq!(
            world(&contradicting).unwrap_err(),
            "RANK=0 of WORLD_SIZE=1 contradicts SLURM_PROCID=3 of SLURM_NTASKS=4; \
             unset the pair that is not meant"
        );
    }

    #[test]
    fn torchrun_inside_slurm_is_believed() {
        let nested = [
            ("TORCHELASTIC_RUN_ID", "none"),
            ("RANK", "9"),
            ("WORLD_SIZE", "16"),
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "2"),
        ];
        assert_eq!(world(&nested), Ok(World { rank: 9, size: 16 }));
    }

    #[test]
    fn half_a_pair_and_nonsense_are_named() {
        let error = |variables: &[(&str, &str)]| world(variables).unwrap_err();
        assert_eq!(
            error(&[("RANK", "0")]),
            "RANK is set and WORLD_SIZE is not; set both or neither"
        );
        assert_eq!(
            error(&[("RANK", "one"), ("WORLD_SIZE", "2")]),
            "RANK=one is no whole number from 0 on"
        );
        assert_eq!(
            error(&[("RANK", "2"), ("WORLD_SIZE", "2")]),
            "RANK=2 is not below WORLD_SIZE=2; ranks count from 0"
        );
        assert_eq!(
            error(&[
                ("PET_NODE_RANK", "0"),
                ("PET_NNODES", "2"),
                ("PET_NPROC_PER_NODE", "8")
            ]),
            "PET_NPROC_PER_NODE=8 asks for several processes a node and none of them is numbered; \
             set RANK and WORLD_SIZE"
        );
    }

    #[test]
    fn a_slurm_allocation_without_a_task_is_no_rank() {
        assert_eq!(world(&[("SLURM_NTASKS", "4")]), Ok(World::ALONE));
    }

    #[test]
    fn what_the_launcher_sets_is_what_a_rank_reads() {
        let set = World::ALONE.environment();
        let read = World::from_variables(|key| {
            set.iter()
                .find(|(name, _)| *name == key)
                .map(|pair| pair.1.clone())
        });
        assert_eq!(read, Ok(World::ALONE));
    }
}
