//! Attributions: how much of the activation of a component, or of a logit, comes from each component
//! before it.
//!
//! # Definition
//!
//! Each site adds up its components and its delta `D`, what the components leave over:
//!
//! ```text
//! y(t) = sum over c of m a_c(t) U_c + d x(t) D^T + b        a_c(t) = x(t) V_c
//! ```
//!
//! The masks `m` and `d` are 1, so that this is the target itself. (With importances for masks the
//! network is another one at each position, and its errors grow from site to site. With `m = 1` and
//! without the delta, the SPD reference attributes in a network that is not the target either.)
//!
//! A target `f` is a number at one position `p`: the activation `x V_c` of a component, or the logit
//! of the token that the network expects next, less the mean of all logits there. The attribution
//! of a component is its activation times the gradient, over all positions, which are those up to
//! `p` in a causal network:
//!
//! ```text
//! A_c = sum over t of a_c(t) U_c . G(t)      G(t) = df / dy(t), the outputs of other sites held fixed
//! ```
//!
//! So it is direct: the part that goes through another site counts as that site's. That of the
//! delta is `sum over t of x(t) D^T . G(t)`. If `f` is linear in the outputs of sites, the
//! attributions add up to all of it but for what reaches `f` around sites (an embedding or bias that
//! is no site).
//!
//! # Program
//!
//! `A_c` is the gradient of `sum over t of y(t) . G(t)` with respect to a mask `m_c` that the row
//! shares, at 1, and likewise for `d`. The program has these masks for inputs, one a row of the
//! batch. Each row has a target of its own, which another input selects: so one replay, with one pass
//! forward and one backward, attributes a target at one position for each of its rows.

use spd_engine::ops::{Draw, Mask, MaskValues};
use spd_engine::{Arena, Builder, Executor, Result, Store, Type, Value};

use crate::decomposition::Decomposition;
use crate::fault::Fault;
use crate::networks::LayerKind;
use crate::prompt::On;
use crate::removal::{fill_text, number, rows};

/// The kind of targets of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum To {
    /// Activations of components.
    Components,
    /// Logits of the tokens that are expected.
    Logits,
}

/// A target.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'t> {
    /// Numbers of its site and of the component; not of the logits.
    pub(crate) component: Option<(usize, usize)>,
    /// A row of the data, `seq_len` ids.
    pub(crate) tokens: &'t [u32],
    /// Its position there.
    pub(crate) position: u32,
}

/// The attributions of a target at a position.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Attributed {
    /// The target.
    pub(crate) target: f64,
    /// The attributions of the components of each site in turn, and after them of its delta.
    pub(crate) sources: Vec<f32>,
}

impl Decomposition {
    /// Outputs `from <site>`, f32 `[rows, c]`, and `from delta <site>`, f32 `[rows, 1]`, of the
    /// sites that targets depend on directly; and `target <site>`, f32 `[rows, 1, c]`, or `target`,
    /// f32 `[rows, 1, v]`, the logits. Inputs, beside `input`:
    ///
    /// - `row`: u32 `[rows, t]`, the number of the row at each of its positions
    /// - `position`: u32 `[rows, 1]`, that of the target among all `rows * t`
    /// - `seed <site>` or `seed`: of the shape of the target, how much of each its row has
    /// - `kept <site>`, f32 `[rows, c]`, and `delta <site>`, f32 `[rows, 1]`: the masks, which are 1
    ///
    /// Returns also which sites take part: those with one row for each position.
    ///
    /// # Errors
    ///
    /// When shapes do not fit, or the program never makes the output of a site.
    pub(crate) fn attribution_program(
        &self,
        store: &Store,
        to: To,
    ) -> Result<(Builder, Vec<usize>)> {
        let mut b = Builder::new();
        let shape = self.shape(rows(self));
        let clean_pass = self.clean_pass(&mut b, store, shape, &self.draws)?;
        let row = b.input("row", &Type::u32(&[shape.rows, shape.positions]))?;
        let position = b.input("position", &Type::u32(&[shape.rows, 1]))?;
        let (mut masked, mut given) = (Vec::new(), Vec::new());
        for (index, (site, clean)) in self.sites.iter().zip(&clean_pass.sites).enumerate() {
            if clean.rows != shape.examples() || site.layer.kind == LayerKind::Filters {
                continue;
            }
            let (path, c) = (site.path(), site.components);
            let kept = b.input(&format!("kept {path}"), &Type::f32(&[shape.rows, c]))?;
            let delta = b.input(&format!("delta {path}"), &Type::f32(&[shape.rows, 1]))?;
            let [mask, of_delta] = [b.embed(row, kept, None)?, b.embed(row, delta, None)?];
            let dims = b.ty(clean.importance).dims.clone();
            let masks = MaskValues {
                mask: Mask::Drawn(Draw::Given),
                importance: None,
                given: Some(b.reshape(mask, &dims)?),
                delta: Some(b.reshape(of_delta, &[shape.examples()])?),
                route: None,
            };
            masked.push((index, masks));
            given.push([kept, delta]);
        }
        let pass = self.masked_pass(&mut b, &clean_pass, &masked)?;
        let sites: Vec<usize> = masked.iter().map(|(index, _)| *index).collect();
        let mut seeds = Vec::new();
        let mut seed = |b: &mut Builder, of: &str, target: Value| {
            let ty = b.ty(target).clone();
            b.output(format!("target{of}"), target);
            seeds.push((target, b.input(&format!("seed{of}"), &ty)?));
            Ok::<_, spd_engine::BuildError>(())
        };
        match to {
            To::Logits => {
                let logits = b.take_rows(pass.output, position)?;
                seed(&mut b, "", logits)?;
            }
            To::Components => {
                for &index in &sites {
                    let site = &self.sites[index];
                    // Nothing comes before an embedding.
                    if site.layer.kind != LayerKind::Embedding {
                        let x = b.take_rows(pass.inputs[index], position)?;
                        let acts = b.matmul(x, clean_pass.sites[index].values.v_ic)?;
                        seed(&mut b, &format!(" {}", site.path()), acts)?;
                    }
                }
            }
        }
        let output = |&index: &usize| pass.outputs[index].expect("filters alone have none");
        let outputs: Vec<Value> = sites.iter().map(output).collect();
        let nothing = b.constant(0.0, &[])?;
        let upstream = b.seeded_gradients(nothing, &seeds, &outputs)?;
        let of_sites = sites.iter().zip(outputs).zip(upstream).zip(given);
        for (((&index, output), upstream), given) in of_sites {
            let Some(upstream) = upstream else {
                continue;
            };
            let found = b.seeded_gradients(nothing, &[(output, upstream)], &given)?;
            let path = self.sites[index].path();
            for (name, value) in ["from", "from delta"].into_iter().zip(found) {
                if let Some(value) = value {
                    b.output(format!("{name} {path}"), value);
                }
            }
        }
        Ok((b, sites))
    }
}

/// The program with the memory that it runs in.
pub(crate) struct Attributor {
    to: To,
    program: Executor,
    arena: Arena,
    /// Numbers of the sites that take part.
    pub(crate) sites: Vec<usize>,
    /// The outputs with attributions, in order, and their width; `None` if no target depends on
    /// that output.
    outputs: Vec<(Option<String>, usize)>,
}

impl Attributor {
    /// # Errors
    ///
    /// When there is too little memory, or the target never makes the output of a site.
    pub(crate) fn new(
        of: &Decomposition,
        store: &Store,
        to: To,
        on: &On<'_>,
    ) -> Result<Self, Fault> {
        let (b, sites) = of.attribution_program(store, to)?;
        let (mut program, arena) = on.plan(&b, store)?;
        program.parameters.seed = of.run.seed;
        let mut outputs = Vec::new();
        for &site in &sites {
            let (path, c) = (of.sites[site].path(), of.sites[site].components);
            for (input, output, width) in [("kept", "from", c), ("delta", "from delta", 1)] {
                let [input, output] = [input, output].map(|what| format!("{what} {path}"));
                if program.has_input(&input) {
                    program.input(&input).fill(1.0);
                }
                let is_made = program.output_names().any(|known| known == output);
                outputs.push((is_made.then_some(output), width));
            }
        }
        Ok(Self {
            to,
            program,
            arena,
            sites,
            outputs,
        })
    }

    /// Attributes a batch of at most [`rows`] targets.
    ///
    /// # Errors
    ///
    /// When a GPU refuses.
    pub(crate) fn measure(
        &mut self,
        of: &Decomposition,
        store: &mut Store,
        asked: &[Asked<'_>],
    ) -> Result<Vec<Attributed>, Fault> {
        let t = of.shape(1).positions;
        let of_row = |row: usize| asked.get(row).or(asked.first());
        fill_text(&mut self.program, t, |row| Some(of_row(row)?.tokens));
        let positions = self.program.input_u32("position").iter_mut().enumerate();
        for (row, to) in positions {
            *to = number(row * t) + of_row(row).map_or(0, |asked| asked.position);
        }
        let targets = match self.to {
            To::Components => self.components(of, store, asked)?,
            To::Logits => self.logits(of, store, asked.len())?,
        };
        let of_rows = targets.into_iter().enumerate();
        Ok(of_rows
            .map(|(row, target)| Attributed {
                target,
                sources: self.sources(store, row),
            })
            .collect())
    }

    /// Runs the program for the activations of components, which it returns.
    fn components(
        &mut self,
        of: &Decomposition,
        store: &mut Store,
        asked: &[Asked<'_>],
    ) -> Result<Vec<f64>, Fault> {
        let name = |what: &str, site: usize| format!("{what} {}", of.sites[site].path());
        for &site in &self.sites {
            if self.program.has_input(&name("seed", site)) {
                self.program.input(&name("seed", site)).fill(0.0);
            }
        }
        let place = |row: usize, (site, component): (usize, usize)| {
            row * of.sites[site].components + component
        };
        let places = asked.iter().filter_map(|asked| asked.component).enumerate();
        for (row, of_row) in places.clone() {
            self.program.input(&name("seed", of_row.0))[place(row, of_row)] = 1.0;
        }
        self.program.run_and_fetch(store, &mut self.arena)?;
        let target = |(row, of_row): (usize, (usize, usize))| {
            let name = name("target", of_row.0);
            f64::from(self.program.output(&name, store, &self.arena)[place(row, of_row)])
        };
        Ok(places.map(target).collect())
    }

    /// Runs the program for the logits of the tokens that are expected, less the mean of all, which
    /// it returns. A first run shows which tokens these are.
    fn logits(
        &mut self,
        of: &Decomposition,
        store: &mut Store,
        asked: usize,
    ) -> Result<Vec<f64>, Fault> {
        let Self { program, arena, .. } = self;
        program.input("seed").fill(0.0);
        program.run_and_fetch(store, arena)?;
        let logits = program.output("target", store, arena).to_vec();
        let v = logits.len() / rows(of);
        let seeds = program.input("seed").chunks_exact_mut(v);
        let mut targets = Vec::with_capacity(asked);
        for (seed, logits) in seeds.zip(logits.chunks_exact(v)).take(asked) {
            // Of equal ones the first.
            let all = logits.iter().enumerate().rev();
            let best = all.max_by(|a, b| a.1.total_cmp(b.1));
            let (best, &largest) = best.unwrap_or((0, &0.0));
            let mean = logits.iter().copied().map(f64::from).sum::<f64>() / v as f64;
            targets.push(f64::from(largest) - mean);
            seed.fill(-1.0 / v as f32);
            seed[best] += 1.0;
        }
        program.run_and_fetch(store, arena)?;
        Ok(targets)
    }

    /// The attribution of each source in a row.
    fn sources(&self, store: &Store, row: usize) -> Vec<f32> {
        let mut sources: Vec<f32> = Vec::new();
        for (name, width) in &self.outputs {
            if let Some(name) = name {
                let values = self.program.output(name, store, &self.arena);
                sources.extend(&values[row * width..][..*width]);
            } else {
                sources.resize(sources.len() + width, 0.0);
            }
        }
        sources
    }
}

#[cfg(test)]
mod tests;
