//! A training run of a toy model of superposition once more, in candle's f64 tensors with candle's
//! gradients: what there are no recorded numbers for is compared with it. Written from the formulas
//! of the reference, and slow.

use std::collections::BTreeMap;

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor, Var};
use spd_engine::Store;
use spd_trainer::component_model::{ImportanceKind, Routing, Sampling, Sigmoid};
use spd_trainer::decomposition::Decomposition;
use spd_trainer::losses::exponent;
use spd_trainer::losses::{PgdInit, PgdRecon, PgdScope, Term};
use spd_trainer::run_file::Run;

/// Draws by the name of the input that has them.
pub(super) type Draws<'d> = &'d dyn Fn(&str, usize) -> Vec<f32>;

/// Named tensors.
type Tensors = BTreeMap<String, Tensor>;

struct Site {
    path: String,
    /// What its importance function is called.
    importance: String,
    /// f64 `[o, i]`.
    weight: Tensor,
}

/// A run in progress.
pub(super) struct Oracle {
    run: Run,
    sites: Vec<Site>,
    bias: Tensor,
    /// Components and importance functions by their name in the store.
    parameters: Tensors,
    /// Both moments of each.
    moments: BTreeMap<String, [Tensor; 2]>,
    /// Of each site, what the frequency term estimates, `[c]`.
    estimates: Vec<Tensor>,
}

/// What one step found.
pub(super) struct Found {
    /// Each term and the total, as in a row.
    pub(super) losses: BTreeMap<String, f64>,
    /// Before clipping; none where nothing depends on the parameter.
    pub(super) gradients: Tensors,
    /// Means of what is penalised, `[c]` a site.
    frequencies: Vec<Tensor>,
}

/// How a site is masked.
#[derive(Clone)]
struct Masks {
    /// `[b, c]`.
    components: Tensor,
    /// `[b, 1]`.
    delta: Option<Tensor>,
    /// `[b, 1]`.
    route: Option<Tensor>,
}

/// A pass: the inputs of the sites, and the output.
struct Pass {
    inputs: Vec<Tensor>,
    output: Tensor,
}

/// What a step's losses are made of.
struct Step<'s> {
    x: &'s Tensor,
    clean: &'s Pass,
    /// Importances, `[b, c]` a site.
    g: &'s [Tensor],
    /// Components, whose gradients are asked for.
    components: &'s BTreeMap<String, Var>,
    draws: Draws<'s>,
}

fn tensor(values: &[f32], dims: &[usize]) -> Result<Tensor> {
    let values = values.iter().map(|&value| f64::from(value)).collect();
    Tensor::from_vec::<_, f64>(values, dims, &Device::Cpu)
}

fn scalar(of: &Tensor) -> Result<f64> {
    of.to_scalar()
}

/// `clamp(z, 0, 1)`, with slope `above` above 1.
fn gate(z: &Tensor, above: f64) -> Result<Tensor> {
    z.relu()? - (z.affine(1.0, -1.0)?.relu()? * (1.0 - above))?
}

fn logistic(z: &Tensor) -> Result<Tensor> {
    (z.neg()?.exp()? + 1.0)?.recip()
}

/// A smooth sigmoid, for masks and for the penalty; `None` for those that are made of clamps.
fn smooth(kind: Sigmoid, z: &Tensor) -> Result<Option<Tensor>> {
    Ok(match kind {
        Sigmoid::Normal => Some(logistic(z)?),
        Sigmoid::SwishHard => {
            let below = (z * logistic(&(z * 10.0)?)?)?;
            let above = (z.affine(1.0, -1.0)? * logistic(&z.affine(-10.0, 10.0)?)?)?;
            Some(((z.affine(-1.0, 1.0)? + below)? + above)?)
        }
        _ => None,
    })
}

fn lower(kind: Sigmoid, z: &Tensor) -> Result<Tensor> {
    match (smooth(kind, z)?, kind) {
        (Some(smooth), _) => Ok(smooth),
        (None, Sigmoid::UpperLeakyHard) => gate(z, 0.01),
        _ => gate(z, 0.0),
    }
}

fn upper(kind: Sigmoid, z: &Tensor) -> Result<Tensor> {
    match (smooth(kind, z)?, kind) {
        (Some(smooth), _) => Ok(smooth),
        (None, Sigmoid::Hard) => gate(z, 0.0),
        _ => gate(z, 0.01),
    }
}

/// A scalar whose gradient for `z` is what the lower sigmoid hands on of `incoming`.
fn through_lower(kind: Sigmoid, z: &Tensor, incoming: &Tensor) -> Result<Tensor> {
    if kind != Sigmoid::LeakyHard {
        return (lower(kind, z)? * incoming)?.sum_all();
    }
    let (below, above) = (z.le(0.0)?, z.gt(1.0)?);
    let leak = (incoming.minimum(0.0)? * 0.01)?;
    let rule = below.where_cond(&leak, incoming)?;
    let rule = above.where_cond(&rule.zeros_like()?, &rule)?;
    (z * rule.detach())?.sum_all()
}

/// `V` and `U` of the sites come first, and are called by path and part.
fn name_of(sites: &[Site], index: usize, in_store: &str) -> String {
    match sites.get(index / 2) {
        Some(site) => format!("{}.{}", site.path, ["V", "U"][index % 2]),
        None => in_store.to_owned(),
    }
}

impl Oracle {
    pub(super) fn new(decomposition: &Decomposition, store: &Store) -> Result<Self> {
        let get = |name: &str| {
            let slot = store.slot(name).expect("a tensor of the run");
            tensor(store.get(slot), &store.ty(slot).dims)
        };
        let sites = decomposition.sites.iter().map(|site| {
            Ok(Site {
                path: site.path().to_owned(),
                importance: format!("_ci_fns.{}", site.dashed()),
                weight: get(&format!("target_model.{}.weight", site.path()))?,
            })
        });
        let sites = sites.collect::<Result<Vec<_>>>()?;
        let mut parameters = Tensors::new();
        for (index, parameter) in decomposition.parameters.iter().enumerate() {
            let name = store.name(parameter.slot);
            parameters.insert(name_of(&sites, index, name), get(name)?);
        }
        let moments = parameters.iter().map(|(name, value)| {
            let zeros = value.zeros_like()?;
            Ok((name.clone(), [zeros.clone(), zeros]))
        });
        let sites_of_run = decomposition.sites.iter();
        let estimates = sites_of_run
            .map(|site| Tensor::zeros(site.components, candle_core::DType::F64, &Device::Cpu));
        Ok(Self {
            run: decomposition.run.clone(),
            estimates: estimates.collect::<Result<_>>()?,
            bias: get("target_model.linear2.bias")?,
            moments: moments.collect::<Result<_>>()?,
            sites,
            parameters,
        })
    }

    /// Name of a parameter here, by its place among those of the run and its name in the store.
    pub(super) fn name(&self, index: usize, in_store: &str) -> String {
        name_of(&self.sites, index, in_store)
    }

    pub(super) fn parameter(&self, name: &str) -> &Tensor {
        &self.parameters[name]
    }

    pub(super) fn first_moment(&self, name: &str) -> &Tensor {
        &self.moments[name][0]
    }

    fn components(&self) -> Result<BTreeMap<String, Var>> {
        let all = self.parameters.iter();
        let all = all.filter(|(name, _)| !name.starts_with("_ci_fns"));
        all.map(|(name, value)| Ok((name.clone(), Var::from_tensor(value)?)))
            .collect()
    }

    /// `linear1`, hidden layers, `linear2`, relu; `masked` by site.
    fn pass(
        &self,
        x: &Tensor,
        components: &BTreeMap<String, Var>,
        masked: &BTreeMap<usize, Masks>,
    ) -> Result<Pass> {
        let mut inputs = vec![x.clone(); self.sites.len()];
        let mut order: Vec<usize> = (0..self.sites.len()).collect();
        order.sort_by_key(|&index| match self.sites[index].path.as_str() {
            "linear1" => 0,
            "linear2" => 2,
            _ => 1,
        });
        let mut x = x.clone();
        for index in order {
            inputs[index] = x.clone();
            let site = &self.sites[index];
            let frozen = x.matmul(&site.weight.t()?)?;
            let y = match masked.get(&index) {
                None => frozen,
                Some(masks) => {
                    let v = components[&format!("{}.V", site.path)].as_tensor();
                    let u = components[&format!("{}.U", site.path)].as_tensor();
                    let mut y = (x.matmul(v)? * &masks.components)?.matmul(u)?;
                    if let Some(delta) = &masks.delta {
                        let rest = (site.weight.t()? - v.matmul(u)?)?;
                        y = (y + x.matmul(&rest)?.broadcast_mul(delta)?)?;
                    }
                    match &masks.route {
                        Some(route) => {
                            let stays = frozen.broadcast_mul(&route.affine(-1.0, 1.0)?)?;
                            (y.broadcast_mul(route)? + stays)?
                        }
                        None => y,
                    }
                }
            };
            x = y;
        }
        Ok(Pass {
            inputs,
            output: x.broadcast_add(&self.bias)?.relu()?,
        })
    }

    /// Logits `[b, c]` of a site from what it sees: its activations `[b, c]`, or its input
    /// `[b, i]`.
    fn logits(
        &self,
        index: usize,
        seen: &Tensor,
        parameters: &BTreeMap<String, Var>,
    ) -> Result<Tensor> {
        let kind = &self.run.importance.kind;
        let (mut x, hidden) = match kind {
            ImportanceKind::Mlp(mlp) => (seen.unsqueeze(2)?, &mlp.hidden),
            ImportanceKind::VectorMlp(mlp) => (seen.unsqueeze(1)?, &mlp.hidden),
            ImportanceKind::SharedMlp(mlp) => (seen.clone(), &mlp.hidden),
            ImportanceKind::GlobalSharedMlp(_)
            | ImportanceKind::GlobalSharedTransformer(_)
            | ImportanceKind::GlobalReverseResidual(_)
            | ImportanceKind::GlobalTransformer(_)
            | ImportanceKind::ChunkwiseTransformer(_) => {
                panic!("is recorded, and in no case here")
            }
        };
        for depth in 0..=hidden.len() {
            let name = format!("{}.layers.{}", self.sites[index].importance, 2 * depth);
            let weight = parameters[&format!("{name}.W")].as_tensor();
            let bias = parameters[&format!("{name}.b")].as_tensor();
            if depth > 0 {
                x = x.gelu_erf()?;
            }
            x = match kind {
                ImportanceKind::SharedMlp(_) => x.matmul(weight)?,
                // [b, c, i, 1] times [c, i, o], summed over i.
                _ => x.unsqueeze(3)?.broadcast_mul(weight)?.sum(2)?,
            };
            x = x.broadcast_add(bias)?;
        }
        match kind {
            ImportanceKind::SharedMlp(_) => Ok(x),
            _ => x.squeeze(2),
        }
    }

    fn faithfulness(&self, components: &BTreeMap<String, Var>) -> Result<Tensor> {
        let relative = self.run.losses.iter().any(|loss| match &loss.term {
            Term::Faithfulness(said) => said.relative,
            _ => false,
        });
        let (mut sum, mut weights) = (Tensor::zeros((), candle_core::DType::F64, &Device::Cpu)?, 0);
        for site in &self.sites {
            let v = components[&format!("{}.V", site.path)].as_tensor();
            let u = components[&format!("{}.U", site.path)].as_tensor();
            let rest = (site.weight.t()? - v.matmul(u)?)?;
            let squares = rest.sqr()?.sum_all()?;
            if relative {
                sum = (sum + (squares / site.weight.sqr()?.sum_all()?)?)?;
                weights += 1;
            } else {
                sum = (sum + squares)?;
                weights += rest.elem_count();
            }
        }
        sum / weights as f64
    }

    /// The mean over rows of each component's penalised importances, `[c]` a site.
    fn frequencies(&self, above: &[Var], number: u64) -> Result<Vec<Tensor>> {
        let steps = self.run.train.steps;
        let losses = &self.run.losses;
        let mean = |above: &Var| {
            // The swishes dip below zero, where a power has no value: they count as zero there.
            let x = above.relu()?;
            let penalised = losses.iter().find_map(|loss| match &loss.term {
                Term::ImportanceMinimality(settings) => {
                    let p = exponent(settings, number as f64 / steps as f64);
                    Some(x.affine(1.0, 1e-12).and_then(|x| x.powf(p)))
                }
                Term::SmoothL0(settings) => {
                    let square = settings.gamma.at(number, steps).powi(2);
                    let scale = [1.0, 1.0 + square][usize::from(settings.normalize_at_one)];
                    let below = |x: &Tensor| x.affine(1.0, square)?.affine(1.0 / scale, 0.0);
                    Some(x.sqr().and_then(|squares| &squares / below(&squares)?))
                }
                _ => None,
            });
            penalised.transpose()?.unwrap_or(x).mean(0)
        };
        above.iter().map(mean).collect()
    }

    /// The sum of `f (a + b log2(1 + r f))` over all frequencies.
    fn counted(frequencies: &[Tensor], [a, b, r]: [f64; 3]) -> Result<Tensor> {
        let mut sum = Tensor::zeros((), candle_core::DType::F64, &Device::Cpu)?;
        for f in frequencies {
            let log2 = (f.affine(r, 1.0)?.log()? * (b / 2f64.ln()))?;
            sum = (sum + (f * log2.affine(1.0, a)?)?.sum_all()?)?;
        }
        Ok(sum)
    }

    /// The frequencies that the frequency term reads: where it estimates them, the estimates with
    /// the gradients of the newest ones.
    fn estimated(&self, newest: &[Tensor], number: u64) -> Result<Vec<Tensor>> {
        let Some(decay) = self.decay() else {
            return Ok(newest.to_vec());
        };
        let both = newest.iter().zip(&self.estimates);
        both.map(|(f, estimate)| {
            let all = 1.0 - decay.powi(i32::try_from(number + 1).expect("few steps"));
            let kept = (estimate * decay)?;
            let smooth = ((kept + (f.detach() * (1.0 - decay))?)? / all)?;
            smooth + (f - f.detach())?
        })
        .collect()
    }

    /// The part of an estimate that a step keeps, where there are any.
    fn decay(&self) -> Option<f64> {
        let mut losses = self.run.losses.iter();
        let halflife = losses.find_map(|loss| match &loss.term {
            Term::Frequency(settings) => settings.halflife,
            _ => None,
        });
        halflife.map(|halflife| 0.5f64.powf(1.0 / halflife))
    }

    fn route(
        &self,
        step: &Step<'_>,
        sample: &str,
        routing: Routing,
        path: &str,
    ) -> Result<Option<Tensor>> {
        let rows = step.x.dims()[0];
        Ok(match routing {
            Routing::All | Routing::Layerwise => None,
            _ => {
                let drawn = (step.draws)(&format!("route.{sample}.{path}"), rows);
                Some(tensor(&drawn, &[rows, 1])?)
            }
        })
    }

    /// Passes under some masks: one over all sites, or one a site.
    fn passes(&self, step: &Step<'_>, masks: &[Masks], routing: Routing) -> Result<Vec<Pass>> {
        let masks: Vec<(usize, Masks)> = masks.iter().cloned().enumerate().collect();
        let together = if routing == Routing::Layerwise {
            1
        } else {
            masks.len()
        };
        let groups = masks.chunks(together);
        groups
            .map(|group| self.pass(step.x, step.components, &group.iter().cloned().collect()))
            .collect()
    }

    fn reconstruction(&self, step: &Step<'_>, term: &Term) -> Result<Tensor> {
        let mse = |pass: &Pass| (&pass.output - &step.clean.output)?.sqr()?.mean_all();
        let rows = step.x.dims()[0];
        let routing = term.routing().expect("a reconstruction");
        let mut distances = Vec::new();
        if let Term::PgdRecon(pgd) = term {
            distances = self.adversaries(step, term.name(), pgd)?;
        }
        let samples = match term {
            Term::PgdRecon(_) => 0,
            _ if term.is_stochastic() => self.run.train.mask_samples,
            _ => 1,
        };
        for k in 0..samples {
            let sample = format!("{}.m{k}", term.name());
            let masks = self.sites.iter().zip(step.g).map(|(site, g)| {
                let path = &site.path;
                let mut delta = None;
                let components = match term {
                    Term::UnmaskedRecon(_) => g.ones_like()?,
                    Term::CiMaskedRecon(_) => g.clone(),
                    _ => {
                        let drawn = (step.draws)(&format!("src.{sample}.{path}"), g.elem_count());
                        let r = tensor(&drawn, g.dims())?;
                        if self.run.decomposition.delta {
                            let drawn = (step.draws)(&format!("dmask.{sample}.{path}"), rows);
                            delta = Some(tensor(&drawn, &[rows, 1])?);
                        }
                        (g + (g.affine(-1.0, 1.0)? * r)?)?
                    }
                };
                let route = self.route(step, &sample, routing, path)?;
                Ok(Masks {
                    components,
                    delta,
                    route,
                })
            });
            let masks = masks.collect::<Result<Vec<_>>>()?;
            for pass in self.passes(step, &masks, routing)? {
                distances.push(match term {
                    Term::StochasticHiddenActsRecon(_) => inputs_apart(&pass, step.clean)?,
                    _ => mse(&pass)?,
                });
            }
        }
        Tensor::stack(&distances, 0)?.mean_all()
    }

    /// The loss of each adversary of a term where its ascent ended.
    fn adversaries(&self, step: &Step<'_>, name: &str, pgd: &PgdRecon) -> Result<Vec<Tensor>> {
        let rows = step.x.dims()[0];
        let all: Vec<usize> = (0..self.sites.len()).collect();
        let together = if pgd.routing == Routing::Layerwise {
            1
        } else {
            all.len()
        };
        let mut losses = Vec::new();
        for (k, attacked) in all.chunks(together).enumerate() {
            let sample = format!("{name}.p{k}");
            let mut sources: Vec<Tensor> = Vec::new();
            for &index in attacked {
                let c = step.g[index].dims()[1];
                let path = &self.sites[index].path;
                let (own, shared) = (pgd.scope == PgdScope::UniquePerDatapoint, [1, 1]);
                let mut kinds = vec![("src", if own { [rows, c] } else { [1, c] })];
                if self.run.decomposition.delta {
                    kinds.push(("dmask", if own { [rows, 1] } else { shared }));
                }
                for (kind, dims) in kinds {
                    let count = dims[0] * dims[1];
                    let start = match pgd.init {
                        PgdInit::Ones => vec![1.0; count],
                        PgdInit::Zeroes => vec![0.0; count],
                        PgdInit::Random => (step.draws)(&format!("{kind}.{sample}.{path}"), count),
                    };
                    sources.push(tensor(&start, &dims)?);
                }
            }
            let loss = |sources: &[Tensor]| {
                let each = sources.len() / attacked.len();
                let masks = attacked
                    .iter()
                    .zip(sources.chunks(each))
                    .map(|(&index, source)| {
                        let g = &step.g[index];
                        let r = source[0].broadcast_as(g.shape())?;
                        let delta = source.get(1).map(|delta| delta.broadcast_as((rows, 1)));
                        let path = &self.sites[index].path;
                        let masks = Masks {
                            components: (g + (g.affine(-1.0, 1.0)? * r)?)?,
                            delta: delta.transpose()?,
                            route: self.route(step, &format!("{name}.p0"), pgd.routing, path)?,
                        };
                        Ok((index, masks))
                    });
                let masks = masks.collect::<Result<BTreeMap<_, _>>>()?;
                let pass = self.pass(step.x, step.components, &masks)?;
                (pass.output - &step.clean.output)?.sqr()?.mean_all()
            };
            for _ in 0..pgd.steps {
                let vars = sources
                    .iter()
                    .map(Var::from_tensor)
                    .collect::<Result<Vec<_>>>()?;
                let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
                let gradients = loss(&tensors)?.backward()?;
                let each = tensors.len() / attacked.len();
                for (&index, sources) in attacked.iter().zip(tensors.chunks(each)) {
                    assert_no_sign_is_rounding(&gradients, sources, &step.g[index])?;
                }
                for (source, var) in sources.iter_mut().zip(&vars) {
                    if let Some(gradient) = gradients.get(var.as_tensor()) {
                        let moved = (&*source + (gradient.sign()? * pgd.step_size)?)?;
                        *source = moved.clamp(0.0, 1.0)?.detach();
                    }
                }
            }
            losses.push(loss(&sources)?);
        }
        Ok(losses)
    }

    /// Losses and gradients of a step, without its update.
    pub(super) fn look(&self, x: &[f32], number: u64, draws: Draws<'_>) -> Result<Found> {
        let run = &self.run;
        let rows = run.train.batch_size;
        let x = tensor(x, &[rows, x.len() / rows])?;
        let components = self.components()?;
        let clean = self.pass(&x, &components, &BTreeMap::new())?;
        let functions = self.parameters.iter();
        let functions = functions.filter(|(name, _)| name.starts_with("_ci_fns"));
        let functions = functions
            .map(|(name, value)| Ok((name.clone(), Var::from_tensor(value)?)))
            .collect::<Result<BTreeMap<String, Var>>>()?;
        let (mut logits, mut noisy, mut g, mut above) = (vec![], vec![], vec![], vec![]);
        for (index, site) in self.sites.iter().enumerate() {
            let seen = match run.importance.kind {
                ImportanceKind::Mlp(_) => clean.inputs[index]
                    .matmul(components[&format!("{}.V", site.path)].as_tensor())?,
                _ => clean.inputs[index].clone(),
            };
            let z = self.logits(index, &seen, &functions)?;
            let masked = match run.importance.sampling {
                Sampling::Continuous => z.clone(),
                Sampling::Binomial => {
                    let drawn = draws(&format!("noise.{}", site.path), z.elem_count());
                    ((&z * 1.05)? - (tensor(&drawn, z.dims())? * 0.05)?)?
                }
            };
            g.push(Var::from_tensor(
                &lower(run.importance.sigmoid, &masked)?.detach(),
            )?);
            above.push(Var::from_tensor(
                &upper(run.importance.sigmoid, &z)?.detach(),
            )?);
            logits.push(z);
            noisy.push(masked);
        }
        let importances: Vec<Tensor> = g.iter().map(|g| g.as_tensor().clone()).collect();
        let step = Step {
            x: &x,
            clean: &clean,
            g: &importances,
            components: &components,
            draws,
        };
        let frequencies = self.frequencies(&above, number)?;
        let mut losses = BTreeMap::new();
        let mut total = Tensor::zeros((), candle_core::DType::F64, &Device::Cpu)?;
        for loss in &run.losses {
            let value = match &loss.term {
                Term::Faithfulness(_) => self.faithfulness(&components)?,
                Term::ImportanceMinimality(settings) => {
                    Self::counted(&frequencies, [1.0, settings.beta, rows as f64])?
                }
                Term::SmoothL0(_) => Self::counted(&frequencies, [1.0, 0.0, 1.0])?,
                Term::Frequency(settings) => {
                    let read = self.estimated(&frequencies, number)?;
                    Self::counted(&read, [0.0, 1.0, settings.reference_count as f64])?
                }
                term => self.reconstruction(&step, term)?,
            };
            losses.insert(format!("loss/{}", loss.term.name()), scalar(&value)?);
            total = (total + (value * loss.coeff.at(number, run.train.steps))?)?;
        }
        losses.insert("loss/total".to_owned(), scalar(&total)?);
        // The rule of the lower sigmoid asks for all that arrives at an importance, so that is
        // summed first.
        let first = total.backward()?;
        let mut second = Tensor::zeros((), candle_core::DType::F64, &Device::Cpu)?;
        for index in 0..self.sites.len() {
            if let Some(incoming) = first.get(g[index].as_tensor()) {
                let kind = run.importance.sigmoid;
                second = (second + through_lower(kind, &noisy[index], &incoming.detach())?)?;
            }
            if let Some(incoming) = first.get(above[index].as_tensor()) {
                let upper = upper(run.importance.sigmoid, &logits[index])?;
                second = (second + (upper * incoming.detach())?.sum_all()?)?;
            }
        }
        let second = second.backward()?;
        let mut gradients = Tensors::new();
        for (name, var) in components.iter().chain(&functions) {
            let parts = [&first, &second].map(|store| store.get(var.as_tensor()));
            let mut sum: Option<Tensor> = None;
            for part in parts.into_iter().flatten() {
                sum = Some(match sum {
                    Some(sum) => (sum + part)?,
                    None => part.clone(),
                });
            }
            if let Some(sum) = sum {
                gradients.insert(name.clone(), sum.detach());
            }
        }
        let frequencies = frequencies.iter().map(Tensor::detach).collect();
        Ok(Found {
            losses,
            gradients,
            frequencies,
        })
    }

    /// An update of the warm-up, of which `made` are made.
    pub(super) fn warm_up(&mut self, made: u64) -> Result<()> {
        let components = self.components()?;
        let gradients = self.faithfulness(&components)?.backward()?;
        let gradients = components.iter().map(|(name, var)| {
            let gradient = gradients.get(var.as_tensor()).expect("it depends on all");
            (name.clone(), gradient.detach())
        });
        let warmup = self.run.train.faithfulness_warmup;
        let how = (made + 1, warmup.lr, warmup.weight_decay);
        self.adamw(&gradients.collect(), how)?;
        if made + 1 == warmup.steps {
            for moments in self.moments.values_mut() {
                *moments = [moments[0].zeros_like()?, moments[1].zeros_like()?];
            }
        }
        Ok(())
    }

    /// Clips what a step found, and updates.
    pub(super) fn update(&mut self, found: &Found, number: u64) -> Result<()> {
        let train = &self.run.train;
        let mut clipped = Tensors::new();
        for (clip, is_importance) in [
            (train.clip_components, false),
            (train.clip_importance, true),
        ] {
            let all = found.gradients.iter();
            let of_group = all.filter(|(name, _)| name.starts_with("_ci_fns") == is_importance);
            let of_group: Vec<(&String, &Tensor)> = of_group.collect();
            let mut squares = 0.0;
            for (_, gradient) in &of_group {
                squares += scalar(&gradient.sqr()?.sum_all()?)?;
            }
            let share = clip.map_or(1.0, |clip| (clip / (squares.sqrt() + 1e-6)).min(1.0));
            for (name, gradient) in of_group {
                clipped.insert(name.clone(), (gradient * share)?);
            }
        }
        if let Some(decay) = self.decay() {
            for (estimate, newest) in self.estimates.iter_mut().zip(&found.frequencies) {
                *estimate = ((&*estimate * decay)? + (newest * (1.0 - decay))?)?;
            }
        }
        let lr = train.lr.at(number, train.steps);
        self.adamw(&clipped, (number + 1, lr, 0.0))
    }

    fn adamw(&mut self, gradients: &Tensors, (updates, lr, decay): (u64, f64, f64)) -> Result<()> {
        let updates = i32::try_from(updates).expect("few updates");
        for (name, gradient) in gradients {
            let [first, second] = self.moments.get_mut(name).expect("a parameter");
            *first = ((&*first * 0.9)? + (gradient * 0.1)?)?;
            *second = ((&*second * 0.999)? + (gradient.sqr()? * 0.001)?)?;
            let root = (&*second / (1.0 - 0.999f64.powi(updates)))?.sqrt()?;
            let step = (&*first / (1.0 - 0.9f64.powi(updates)))?.div(&root.affine(1.0, 1e-8)?)?;
            let parameter = self.parameters.get_mut(name).expect("a parameter");
            *parameter = ((&*parameter * (1.0 - lr * decay))? - (step * lr)?)?;
        }
        Ok(())
    }
}

/// An adversary goes by signs. Where one is a matter of rounding, f32 may go the other way.
///
/// - `sources`: of the components of a site, and of the delta
/// - `g`: the importances of the site. A source acts on what they leave, and its gradient is as
///   small as that.
fn assert_no_sign_is_rounding(gradients: &GradStore, sources: &[Tensor], g: &Tensor) -> Result<()> {
    let left = g.affine(-1.0, 1.0)?.abs()?;
    for (source, is_delta) in sources.iter().zip([false, true]) {
        let Some(gradient) = gradients.get(source) else {
            continue;
        };
        let mut sizes = gradient.abs()?;
        if !is_delta && source.dims()[0] == 1 {
            sizes = (sizes / left.max_keepdim(0)?)?;
        } else if !is_delta {
            sizes = (sizes / &left)?;
        }
        let sizes = sizes.flatten_all()?.to_vec1::<f64>()?;
        let most = sizes.iter().copied().fold(0.0, f64::max);
        let mut doubtful = sizes.iter().filter(|&&g| g > 0.0 && g < 1e-5 * most);
        assert_eq!(doubtful.next(), None, "of gradients up to {most}");
    }
    Ok(())
}

/// Mean squared difference of what goes into the sites.
fn inputs_apart(pass: &Pass, clean: &Pass) -> Result<Tensor> {
    let elements: usize = clean.inputs.iter().map(Tensor::elem_count).sum();
    let apart = pass.inputs.iter().zip(&clean.inputs);
    let apart = apart.map(|(one, other)| (one - other)?.sqr()?.sum_all());
    Tensor::stack(&apart.collect::<Result<Vec<_>>>()?, 0)?.sum_all()? / elements as f64
}
