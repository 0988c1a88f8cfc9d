//! An adversary's ascent: every gradient of every step, and where it ends.
//!
//! A step goes by signs, so an element whose gradient is as small as its rounding may go either
//! way, and from there on all gradients are others. Each step is therefore compared from where
//! theirs stood; where ours would have gone elsewhere, the recorded gradient must be within the
//! tolerance of zero. Where no sign differs, the whole ascent, as it is built into a training step,
//! must end in the very bits.
//!
//! A gradient of components is measured by the largest of its tensor, as everywhere. That of the
//! delta is made as a difference, of what the target's weights and what the components contribute;
//! it is measured by the largest gradient of the step.

use std::collections::BTreeMap;

use spd_engine::{Alone, Builder, Value};
use spd_trainer::decomposition::{CleanPass, Draws};
use spd_trainer::losses::{Ascent, LossInputs, ascents};
use spd_trainer::losses::{PgdRecon, Term};
use spd_trainer::run_file::Run;

use super::compare::{Comparison, largest};
use super::numbers::{Numbers, Tensor};
use super::replica::{Replica, rounded};

/// By adversary and site, rows of `c` columns and the delta's.
type Sources = BTreeMap<(usize, String), Vec<f32>>;

/// Compares the ascent of the run's adversary, which is recorded as `name`, if it has one. Whether
/// every sign is theirs.
pub(super) fn climbs_like_theirs(
    case: &Numbers,
    name: &str,
    run: &Run,
    comparison: &mut Comparison,
) -> bool {
    let mut terms = run.losses.iter().map(|loss| &loss.term);
    let Some(Term::PgdRecon(pgd)) = terms.find(|term| matches!(term, Term::PgdRecon(_))) else {
        return true;
    };
    let pgd = *pgd;
    comparison.group(format!("{name}, ascent"));
    let mut climb = Climb {
        case,
        name,
        pgd,
        replica: Replica::new(run, case, ""),
    };
    let (mut sources, last) = (
        climb.recorded("rng", "init"),
        climb.recorded("pgd", "final"),
    );
    let start = sources.clone();
    let mut program = climb.program(1);
    let mut different = 0;
    for step in 0..pgd.steps {
        climb.run(&mut program, &sources);
        let recorded = |k: usize, path: &str| {
            let key = format!("pgd.{name}.p{k}.s{step}.grad.{path}");
            (case.get(&key).values.as_slice(), key)
        };
        let mut scales = BTreeMap::<usize, f64>::new();
        for (k, path) in sources.keys() {
            let scale = scales.entry(*k).or_default();
            *scale = scale.max(largest(recorded(*k, path).0));
        }
        for ((k, path), source) in &mut sources {
            let (theirs, key) = recorded(*k, path);
            let ours = climb.read(&program, "gradient 0", *k, path);
            let next = |(&r, g): (&f32, &f64)| up(r, *g, rounded(pgd.step_size));
            let next: Vec<f32> = source.iter().zip(theirs).map(next).collect();
            let end = climb.read(&program, "end", *k, path);
            for part in climb.columns(path) {
                let scale = match part {
                    Columns::Components(_) => largest(&part.of(theirs)),
                    Columns::Delta(_) => scales[k],
                };
                comparison.at_scale(scale, &key, &part.of(&ours), &part.of(theirs));
                let small = comparison.rounding_at(scale);
                let theirs = part.of(theirs);
                let (end, next) = (part.of(&end), part.of(&next));
                different += comparison.exact(&format!("step after {key}"), &end, &next, |at| {
                    theirs[at].abs() <= small
                });
            }
            *source = next;
        }
    }
    assert_eq!(
        sources, last,
        "{name}: theirs is the ascent that we take it for"
    );
    if different > 0 {
        return false;
    }
    let mut program = climb.program(pgd.steps);
    climb.run(&mut program, &start);
    for ((k, path), last) in &last {
        let ours = climb.read(&program, "end", *k, path);
        comparison.exact(
            &format!("pgd.{name}.p{k}.final.{path}"),
            &ours,
            last,
            |_| false,
        );
    }
    true
}

/// `clamp(r + step * sign(g), 0, 1)`.
fn up(r: f32, g: f64, step: f32) -> f32 {
    let sign = f32::from(i8::from(g > 0.0) - i8::from(g < 0.0));
    (r + step * sign).clamp(0.0, 1.0)
}

/// Columns of a recorded source with so many components.
#[derive(Clone, Copy)]
enum Columns {
    Components(Width),
    Delta(Width),
}

/// Number of components, and of all columns.
#[derive(Clone, Copy)]
struct Width {
    c: usize,
    all: usize,
}

impl Columns {
    fn of<T: Copy>(self, values: &[T]) -> Vec<T> {
        let (width, columns) = match self {
            Self::Components(width) => (width, 0..width.c),
            Self::Delta(width) => (width, width.c..width.all),
        };
        let rows = values.chunks_exact(width.all);
        rows.flat_map(|row| row[columns.clone()].to_vec()).collect()
    }
}

struct Climb<'n> {
    case: &'n Numbers,
    name: &'n str,
    pgd: PgdRecon,
    replica: Replica,
}

impl<'n> Climb<'n> {
    /// The adversaries of the term and, layerwise, the site of each; else all sites.
    fn adversaries(&self) -> impl Iterator<Item = (usize, &str)> {
        let sites = &self.replica.decomposition.sites;
        let layerwise = self.pgd.routing == spd_trainer::component_model::Routing::Layerwise;
        let number = move |index| if layerwise { index } else { 0 };
        let paths = sites.iter().enumerate();
        paths.map(move |(index, site)| (number(index), site.path()))
    }

    /// The columns of a site's source.
    fn columns(&self, path: &str) -> Vec<Columns> {
        let decomposition = &self.replica.decomposition;
        let site = decomposition.sites.iter().find(|site| site.path() == path);
        let c = site.expect("one of the sites").components;
        let delta = decomposition.run.decomposition.delta;
        let width = Width {
            c,
            all: c + usize::from(delta),
        };
        let mut columns = vec![Columns::Components(width)];
        columns.extend(delta.then_some(Columns::Delta(width)));
        columns
    }

    fn recorded(&self, kind: &str, when: &str) -> Sources {
        let name = |k, path| format!("{kind}.{}.p{k}.{when}.{path}", self.name);
        let adversaries = self.adversaries();
        adversaries
            .map(|(k, path)| ((k, path.to_owned()), self.case.get(&name(k, path)).f32()))
            .collect()
    }

    /// Ascents of so many steps; outputs of the first gradients and of the last sources.
    fn program(&self, steps: usize) -> Alone {
        let batch = self.batch();
        let (mut b, clean_pass) = self.replica.clean_pass();
        let pgd = PgdRecon { steps, ..self.pgd };
        let ascents = self.ascents(&mut b, &clean_pass, &pgd);
        for (k, ascent) in ascents.iter().enumerate() {
            for (site, first) in ascent.sites.iter().zip(&ascent.gradients[0]) {
                let path = self.replica.decomposition.sites[site.index].path();
                let mut output = |what: &str, value: Option<Value>| {
                    if let Some(value) = value {
                        b.output(format!("{what} {k} {path}"), value);
                    }
                };
                output("gradient 0", first.components);
                output("gradient 0 of delta", first.delta);
                output("end", Some(site.source.components));
                output("end of delta", site.source.delta);
            }
        }
        self.replica.executor(&b, batch)
    }

    fn ascents(&self, b: &mut Builder, clean_pass: &CleanPass, pgd: &PgdRecon) -> Vec<Ascent> {
        let Replica {
            decomposition,
            store,
            ..
        } = &self.replica;
        let from = LossInputs {
            name: "ascent",
            ..decomposition.loss_inputs(store, clean_pass, Draws::Inputs)
        };
        ascents(pgd, b, &from).expect("shapes fit")
    }

    fn batch(&self) -> &'n Tensor {
        self.case.get("batch")
    }

    fn run(&mut self, program: &mut Alone, sources: &Sources) {
        let adversaries: Vec<usize> = self.adversaries().map(|(k, _)| k).collect();
        for k in adversaries {
            let name = format!("ascent.p{k}");
            let source = |path: &str| sources[&(k, path.to_owned())].clone();
            self.replica.feed_sources(program, &name, source);
            let route = |path: &str| format!("route.{}.m0.{path}", self.name);
            let route = |path: &str| self.case.get(&route(path)).f32();
            self.replica.feed_routes(program, &name, route);
        }
        program
            .run_and_fetch(&mut self.replica.store)
            .expect("a processor that works");
    }

    /// An output of the components and its companion of the delta, as they are recorded.
    fn read(&self, program: &Alone, what: &str, k: usize, path: &str) -> Vec<f32> {
        let sites = &self.replica.decomposition.sites;
        let site = sites.iter().find(|site| site.path() == path);
        let c = site.expect("one of the sites").components;
        let store = &self.replica.store;
        let components = program.output(&format!("{what} {k} {path}"), store);
        let delta = format!("{what} of delta {k} {path}");
        if !program.output_names().any(|name| name == delta) {
            return components.to_vec();
        }
        let rows = components
            .chunks_exact(c)
            .zip(program.output(&delta, store));
        rows.flat_map(|(row, delta)| row.iter().chain([delta]).copied())
            .collect()
    }
}
