//! The workloads by name, and what may be asked for in place of their own settings.
//!
//! Names, sizes and settings are those of the peers' `workloads.py`. A step is timed half-way
//! through training.

use spd_engine::has_bf16_products;

use super::runs::{Step, length, run, set_length};
use crate::fault::Fault;
use crate::networks::{Input, shipped};
use crate::run_file::{Precision, Run, SitePattern};
use crate::run_plan::why_not;
use crate::sites::resolve;

/// Workloads, at the sizes whose kernels are compiled beforehand.
const KNOWN: [&str; 39] = [
    "tms_5-2",
    "tms_5-2-id",
    "tms_40-10",
    "resid_mlp1",
    "resid_mlp2",
    "seed-16x128",
    "seed-32x256",
    "seed-64x256",
    "seed-128x256",
    "seed-16x128-bf16",
    "seed-32x256-bf16",
    "seed-64x256-bf16",
    "seed-128x256-bf16",
    "full-ss-llama",
    "full-ss-llama-32x512",
    "full-ss-llama-64x512",
    "full-gpt2-h1",
    "tiny-tms",
    "tiny-resid",
    "tiny-seed",
    "tiny-seed-bf16",
    "tiny-ss-llama",
    "tiny-pgd",
    "tiny-gpt2-h1",
    "sd-2x64",
    "sd-1x128",
    "kaufmann-2x64",
    "kaufmann-1x128",
    "byte-4x64",
    "byte-spectral-4x64",
    "byte-loop-4x64",
    "byte-traditional-4x64",
    "encoder-4x64",
    "mixing-4x64",
    "mixing-circular-4x64",
    "attention-4x64",
    "sd-plain-2x64",
    "kaufmann-plain-2x64",
    "kaufmann-tail-2x64",
];

/// Presets of the peers that this build lacks: targets, importance functions or losses are missing.
const NOT_YET: [&str; 3] = ["full-pile-4l", "tiny-pile-4l", "tiny-pile-broadcast"];

/// Ends the name of a workload that is another one in bf16.
const IN_BF16: &str = "-bf16";

/// Most positions of a step.
const MOST_POSITIONS: usize = 1 << 24;

/// A workload: its name, with what was asked for in place of the preset's own, and its run.
#[derive(Debug, Clone, PartialEq)]
pub struct Preset {
    /// Name in the JSON line: `full-gpt2-h1@1x256@fp32`.
    pub name: String,
    /// The run; its data are never opened.
    pub run: Run,
    /// The timed part of the step.
    pub step: Step,
}

/// Settings that replace a preset's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Overrides<'a> {
    /// Rows a step.
    pub batch: Option<usize>,
    /// Positions of a row; of no effect where rows are no sequences.
    pub seq: Option<usize>,
    /// Components of each site.
    pub components: Option<usize>,
    /// So many of the sites, the first ones.
    pub sites: Option<usize>,
    /// Masks that are drawn for a loss.
    pub samples: Option<usize>,
    /// Precision of a step: `fp32`, also written `f32`, `tf32` or `bf16`.
    pub precision: Option<&'a str>,
}

impl Preset {
    /// The step of a run, on random weights and data of its shapes.
    pub fn of(run: Run) -> Self {
        Self {
            name: run.name.clone(),
            run,
            step: Step::Training,
        }
    }

    /// Refuses a precision that is not there where the step is timed.
    ///
    /// # Errors
    ///
    /// In one line that says how to ask for it.
    pub fn check_processor(&self, on_gpu: bool) -> Result<(), Fault> {
        match why_not(self.run.precision, on_gpu, has_bf16_products()) {
            None => Ok(()),
            Some(reason) => Err(Fault::BadInput(format!(
                "bench {}: {reason}; time it with --gpus 1, or with --precision fp32",
                self.name
            ))),
        }
    }

    /// Refuses a number of ranks that cannot share its batch.
    ///
    /// # Errors
    ///
    /// In one line.
    pub fn check_ranks(&self, ranks: usize) -> Result<(), Fault> {
        let why = match self.step {
            Step::GivenMasks { .. } | Step::Network(_) if ranks > 1 => Some(format!(
                "its step is not cut for {ranks} ranks; leave out --cpus"
            )),
            _ => self.run.train.refuses_shards(ranks),
        };
        match why {
            None => Ok(()),
            Some(why) => Err(Fault::BadInput(format!("bench {}: {why}", self.name))),
        }
    }

    /// Positions of a row, if rows are sequences.
    pub(super) fn seq(&self) -> Option<usize> {
        length(&self.run)
    }
}

/// One line that names all workloads.
pub fn known() -> String {
    format!(
        "known: {}; those of sequences in any size, as kaufmann-8x256",
        KNOWN.join(", ")
    )
}

/// A name as its kind and, where it ends in one, its size.
fn split(name: &str) -> (&str, Option<&str>) {
    let size = name.rsplit_once('-').filter(|(_, size)| {
        let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        let parts = size.split_once('x');
        parts.is_some_and(|(rows, positions)| is_number(rows) && is_number(positions))
    });
    match size {
        Some((kind, size)) => (kind, Some(size)),
        None => (name, None),
    }
}

/// Rows and positions of a size, `4x64`; `None` where either is no number from 1.
fn rows_and_positions(size: &str) -> Option<[usize; 2]> {
    let (rows, positions) = size.split_once('x')?;
    let [rows, positions] = [rows.parse().ok()?, positions.parse().ok()?];
    (rows > 0 && positions > 0).then_some([rows, positions])
}

/// Every preset, each in the precisions that are timed beside the peers.
pub fn all() -> Vec<Preset> {
    let each = |name: &&str| {
        let precisions = if name.ends_with(IN_BF16) {
            &["bf16"][..]
        } else if KNOWN.contains(&&*format!("{name}{IN_BF16}")) {
            &["fp32", "tf32"]
        } else {
            &["fp32", "bf16"]
        };
        let made = |precision: &&'static str| {
            let precision = Some(*precision);
            let overrides = Overrides {
                precision,
                ..Overrides::default()
            };
            preset(name, &overrides).expect("a preset of ours")
        };
        precisions.iter().map(made).collect::<Vec<_>>()
    };
    KNOWN.iter().flat_map(each).collect()
}

/// A preset by name, in fp32 unless the name says bf16 or another precision is asked for. The name
/// of what is timed is the peers': it ends in the precision where that is not their preset's own,
/// which is bf16 for all but
/// `seed-*` without an ending (TF32) and steps of networks themselves (fp32).
///
/// # Errors
///
/// When there is no such preset, or it cannot be as asked.
pub fn preset(name: &str, overrides: &Overrides<'_>) -> Result<Preset, Fault> {
    let refuse = |reason: String| Err(Fault::BadInput(format!("bench {name}: {reason}")));
    let in_bf16 = name.strip_suffix(IN_BF16);
    let precision = match overrides.precision {
        None if in_bf16.is_some() => Precision::Bf16,
        None | Some("fp32" | "f32") => Precision::F32,
        Some("bf16") => Precision::Bf16,
        Some("tf32") => Precision::Tf32,
        Some(other) => {
            let reason = format!("no precision `{other}`; steps are timed in fp32, tf32 or bf16");
            return refuse(reason);
        }
    };
    if NOT_YET.contains(&name) {
        return refuse(format!("not yet in this build; {}", known()));
    }
    let (kind, size) = split(in_bf16.unwrap_or(name));
    let found = run(kind).filter(|(_, step)| {
        // Other steps are known in bf16 by a flag alone.
        in_bf16.is_none() || matches!(step, Step::GivenMasks { .. })
    });
    let Some((mut run, step)) = found else {
        return refuse(format!(
            "no such workload; {}; not yet in this build: {}",
            known(),
            NOT_YET.join(", ")
        ));
    };
    let is_theirs = match step {
        Step::GivenMasks { .. } if in_bf16.is_none() => precision == Precision::Tf32,
        Step::Network(_) => precision == Precision::F32,
        _ => precision == Precision::Bf16,
    };
    name.clone_into(&mut run.name);
    if let Some(size) = size {
        if length(&run).is_none() {
            return refuse(format!(
                "rows of {kind} are no sequences; leave out {size}, and ask for rows with --batch"
            ));
        }
        let Some([rows, positions]) = rows_and_positions(size) else {
            return refuse(format!(
                "expected rows and positions from 1, as 8x256, found {size}"
            ));
        };
        run.train.batch_size = rows;
        set_length(&mut run, positions);
    }
    let mut name = name.to_owned();
    let rows = overrides.batch.unwrap_or(run.train.batch_size);
    let positions = length(&run).map(|own| overrides.seq.unwrap_or(own));
    let each = positions.unwrap_or(1);
    if rows.saturating_mul(each) > MOST_POSITIONS {
        return refuse(format!(
            "expected at most {MOST_POSITIONS} positions a step, found {rows} rows of {each}"
        ));
    }
    match positions {
        Some(positions) => {
            set_length(&mut run, positions);
            if overrides.batch.is_some() || overrides.seq.is_some() {
                name = format!("{name}@{rows}x{positions}");
            }
            if let Input::Tokens { n_ctx, .. } = run.target.model.input()
                && positions > n_ctx
            {
                return refuse(format!(
                    "{positions} tokens a row, the target has {n_ctx} positions"
                ));
            }
        }
        None if overrides.batch.is_some() => name = format!("{name}@{rows}"),
        None => {}
    }
    if let Some(samples) = overrides.samples {
        run.train.mask_samples = samples;
        name = format!("{name}@samples={samples}");
    }
    if let Some(components) = overrides.components {
        for site in &mut run.decomposition.sites {
            site.components = components;
        }
        name = format!("{name}@C={components}");
    }
    if let Some(sites) = overrides.sites {
        let all = resolve(&run.decomposition, &shipped(&run.target.model)?.layers())?;
        if sites > all.len() {
            return refuse(format!(
                "{sites} sites are asked for, the workload has {}",
                all.len()
            ));
        }
        let first = all.into_iter().take(sites);
        run.decomposition.sites = first
            .map(|site| SitePattern {
                pattern: site.layer.path,
                components: site.components,
            })
            .collect();
        name = format!("{name}@sites={sites}");
    }
    if !is_theirs {
        name = format!("{name}@{}", spelled(precision));
    }
    (run.train.batch_size, run.eval.batch_size) = (rows, rows);
    run.precision = precision;
    Ok(Preset { name, run, step })
}

/// As the peers call it.
pub(super) fn spelled(precision: Precision) -> &'static str {
    match precision {
        Precision::F32 => "fp32",
        Precision::Tf32 => "tf32",
        Precision::Bf16 => "bf16",
    }
}

#[cfg(test)]
mod tests {
    use spd_engine::Store;

    use super::*;
    use crate::bench::workload::decomposition;
    use crate::parameters::Group;

    fn named(name: &str, batch: Option<usize>, seq: Option<usize>) -> String {
        let overrides = Overrides {
            batch,
            seq,
            ..Overrides::default()
        };
        preset(name, &overrides).unwrap().name
    }

    fn refused(name: &str, overrides: &Overrides<'_>) -> String {
        match preset(name, overrides) {
            Err(Fault::BadInput(line)) => line,
            other => panic!("{other:?}"),
        }
    }

    // Counts by hand, tied components once. TMS 5-2: 20 (5 + 2), and per site 20 (16 + 16 + 16 +
    // 1); with a hidden layer 20 (2 + 2) more, and three sites. TMS 40-10: 200 (40 + 10), and 2 *
    // 200 * 49. Residual MLP: 2 * 100 (1000 + 50), and 2 * 100 * 49; of two layers 4 * 400 (1000 +
    // 25), and 2 (1001 * 256 + 26 * 256 + 2 * 257 * 400); tiny 4 * 12 * 25, and 2 (21 * 8 + 6 * 8 +
    // 2 * 9 * 12). Llama: a block's seven matrices have 2303 rows and columns, so 4 * 1200 * 2303;
    // each has (d_in + 1) 1000 + 1001 * 1200 in its importance function, d_in being 128 and once
    // 341; the tiny ones: 2 * 12 * 440 and 2 (6 * 1092 + 1284). GPT-2: 768 (768 + 2304), and 768
    // (768 * 12 + 12 + 12 + 1).
    #[test]
    fn every_known_name_has_sites_and_parameters() {
        let counts = [
            (140, 1960),
            (220, 2940),
            (10_000, 19_600),
            (210_000, 9800),
            (1_640_000, 937_024),
            (11_054_400, 0),
            (11_054_400, 0),
            (11_054_400, 0),
            (11_054_400, 0),
            (11_054_400, 0),
            (11_054_400, 0),
            (11_054_400, 0),
            (11_054_400, 0),
            (11_054_400, 38_097_600),
            (11_054_400, 38_097_600),
            (11_054_400, 38_097_600),
            (2_359_296, 7_097_088),
            (56, 208),
            (1200, 864),
            (10_560, 0),
            (10_560, 0),
            (10_560, 15_672),
            (10_560, 15_672),
            (768, 1092),
        ];
        for (name, expected) in KNOWN.iter().zip(counts) {
            // Slots of zeros are not touched, so GPT-2 costs no time.
            let mut store = Store::new();
            let preset = preset(name, &Overrides::default()).unwrap();
            let decomposition = decomposition(&preset, &mut store).unwrap();
            let of = |group| decomposition.parameters.of(&[group]).len(&store);
            let found = (of(Group::Components), of(Group::Importance));
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn a_member_name_records_the_changed_keys() {
        assert_eq!(named("tms_5-2", None, None), "tms_5-2@fp32");
        assert_eq!(named("tms_5-2", Some(64), Some(9)), "tms_5-2@64@fp32");
        assert_eq!(named("tms_5-2", None, Some(9)), "tms_5-2@fp32");
        let gpt2 = |batch, seq| named("full-gpt2-h1", batch, seq);
        assert_eq!(gpt2(None, None), "full-gpt2-h1@fp32");
        assert_eq!(gpt2(Some(1), Some(256)), "full-gpt2-h1@1x256@fp32");
        assert_eq!(gpt2(None, Some(256)), "full-gpt2-h1@2x256@fp32");
        let seed = named("seed-16x128", Some(2), None);
        assert_eq!(seed, "seed-16x128@2x128@fp32");
    }

    // As `get` of the peers' workloads.py has them.
    #[test]
    fn a_precision_is_named_where_it_is_not_the_peers_own() {
        let cases = [
            ("tiny-seed", None, "tiny-seed@fp32"),
            ("tiny-seed", Some("bf16"), "tiny-seed@bf16"),
            ("tiny-seed", Some("tf32"), "tiny-seed"),
            ("tiny-ss-llama", Some("tf32"), "tiny-ss-llama@tf32"),
            ("tiny-seed-bf16", None, "tiny-seed-bf16"),
            ("tiny-seed-bf16", Some("bf16"), "tiny-seed-bf16"),
            ("tiny-seed-bf16", Some("fp32"), "tiny-seed-bf16@fp32"),
            ("tiny-ss-llama", Some("f32"), "tiny-ss-llama@fp32"),
            ("tiny-ss-llama", Some("bf16"), "tiny-ss-llama"),
        ];
        for (name, precision, expected) in cases {
            let overrides = Overrides {
                precision,
                ..Overrides::default()
            };
            let found = preset(name, &overrides).unwrap();
            assert_eq!(found.name, expected);
            assert_eq!(
                spelled(found.run.precision),
                precision.map_or_else(
                    || if name.ends_with(IN_BF16) {
                        "bf16"
                    } else {
                        "fp32"
                    },
                    |precision| if precision == "f32" {
                        "fp32"
                    } else {
                        precision
                    }
                ),
                "{expected}"
            );
            assert!(found.check_processor(true).is_ok());
        }
        let batch = Overrides {
            batch: Some(2),
            precision: Some("bf16"),
            ..Overrides::default()
        };
        assert_eq!(
            preset("seed-16x128", &batch).unwrap().name,
            "seed-16x128@2x128@bf16"
        );
    }

    // There is no evaluation, so its batches need not be shared.
    #[test]
    fn ranks_share_the_batch_of_a_step() {
        let eight = Overrides {
            batch: Some(8),
            ..Overrides::default()
        };
        let mut toy = preset("tiny-tms", &eight).unwrap();
        toy.run.eval.batch_size = 3;
        toy.check_ranks(4).unwrap();
        let masked = preset("tiny-seed", &eight).unwrap();
        masked.check_ranks(1).unwrap();
        for (preset, ranks, expected) in [
            (
                &toy,
                3,
                "bench tiny-tms@8@fp32: expected a divisor of the rows of a batch, batch_size = 8, found 3",
            ),
            (
                &masked,
                2,
                "bench tiny-seed@8x16@fp32: its step is not cut for 2 ranks; leave out --cpus",
            ),
        ] {
            let Err(Fault::BadInput(line)) = preset.check_ranks(ranks) else {
                panic!("{expected}")
            };
            assert_eq!(line, expected);
        }
    }

    #[test]
    fn members_differ_in_the_varied_keys_alone() {
        let overrides = Overrides {
            components: Some(5),
            sites: Some(3),
            samples: Some(2),
            ..Overrides::default()
        };
        let varied = preset("tiny-ss-llama", &overrides).unwrap();
        assert_eq!(varied.name, "tiny-ss-llama@samples=2@C=5@sites=3@fp32");
        let usual = preset("tiny-ss-llama", &Overrides::default()).unwrap();
        let mut store = Store::new();
        let all = decomposition(&usual, &mut store).unwrap().model.sites;
        let some = decomposition(&varied, &mut Store::new())
            .unwrap()
            .model
            .sites;
        assert_eq!(some.len(), 3);
        for (some, all) in some.iter().zip(&all) {
            assert_eq!(
                (&some.layer.path, some.components),
                (&all.layer.path, 5),
                "the first sites"
            );
        }
        assert_eq!(varied.run.train.mask_samples, 2);
        let many = Overrides {
            sites: Some(99),
            ..Overrides::default()
        };
        assert_eq!(
            refused("tiny-ss-llama", &many),
            "bench tiny-ss-llama: 99 sites are asked for, the workload has 14"
        );
    }

    #[test]
    fn workloads_of_sequences_have_any_size() {
        for (name, size) in [
            ("kaufmann-8x256", [8, 256]),
            ("sd-3x7", [3, 7]),
            ("byte-loop-1x4096", [1, 4096]),
            ("mixing-circular-2x9", [2, 9]),
            ("seed-2x16-bf16", [2, 16]),
            ("full-ss-llama-1x128", [1, 128]),
        ] {
            let made = preset(name, &Overrides::default()).unwrap();
            let found = [made.run.train.batch_size, made.seq().unwrap()];
            assert_eq!((found, &made.run.name[..]), (size, name));
        }
        assert_eq!(named("sd-3x7", Some(2), None), "sd-3x7@2x7");
        let default = Overrides::default();
        for (name, reason) in [
            (
                "sd-0x64",
                "expected rows and positions from 1, as 8x256, found 0x64",
            ),
            (
                "sd-4x",
                "expected rows and positions from 1, as 8x256, found 4x",
            ),
            (
                "sd-99999999999999999999x1",
                "expected rows and positions from 1, as 8x256, found 99999999999999999999x1",
            ),
            (
                "sd-4096x8192",
                "expected at most 16777216 positions a step, found 4096 rows of 8192",
            ),
            (
                "byte-1x4097",
                "4097 tokens a row, the target has 4096 positions",
            ),
            (
                "tms_5-2-8x64",
                "rows of tms_5-2 are no sequences; leave out 8x64, and ask for rows with --batch",
            ),
        ] {
            assert_eq!(refused(name, &default), format!("bench {name}: {reason}"));
        }
        let many = Overrides {
            batch: Some(1 << 40),
            ..default
        };
        assert!(refused("tms_5-2", &many).contains("expected at most 16777216 positions"));
    }

    #[test]
    fn untimeable_workloads_are_refused_in_one_line() {
        let default = Overrides::default();
        let known = "known: tms_5-2, tms_5-2-id, tms_40-10, resid_mlp1, resid_mlp2, seed-16x128, seed-32x256, \
                     seed-64x256, seed-128x256, seed-16x128-bf16, seed-32x256-bf16, seed-64x256-bf16, seed-128x256-bf16, \
                     full-ss-llama, full-ss-llama-32x512, full-ss-llama-64x512, full-gpt2-h1, tiny-tms, tiny-resid, \
                     tiny-seed, tiny-seed-bf16, tiny-ss-llama, tiny-pgd, tiny-gpt2-h1, sd-2x64, sd-1x128, kaufmann-2x64, \
                     kaufmann-1x128, byte-4x64, byte-spectral-4x64, byte-loop-4x64, byte-traditional-4x64, encoder-4x64, \
                     mixing-4x64, mixing-circular-4x64, attention-4x64, sd-plain-2x64, kaufmann-plain-2x64, \
                     kaufmann-tail-2x64; those of sequences in any size, as kaufmann-8x256";
        assert_eq!(
            refused("full-pile-4l", &default),
            format!("bench full-pile-4l: not yet in this build; {known}")
        );
        let unknown = refused("tmz", &default);
        assert!(
            unknown.starts_with(&format!("bench tmz: no such workload; {known}; not yet"))
                && !unknown.contains('\n'),
            "{unknown}"
        );
        // Nothing but what the peers have is also known in bf16 by name.
        assert!(
            refused("tms_5-2-bf16", &default).starts_with("bench tms_5-2-bf16: no such workload; ")
        );
        let asked = Overrides {
            precision: Some("fp8"),
            ..default
        };
        assert_eq!(
            refused("tms_5-2", &asked),
            "bench tms_5-2: no precision `fp8`; steps are timed in fp32, tf32 or bf16"
        );
        let asked = Overrides {
            precision: Some("tf32"),
            ..default
        };
        let Err(Fault::BadInput(line)) = preset("tms_5-2", &asked).unwrap().check_processor(false)
        else {
            panic!("tf32 on a CPU")
        };
        assert_eq!(
            line,
            "bench tms_5-2@tf32: tf32 is for GPUs, and a CPU has none; time it with --gpus 1, or with --precision fp32"
        );
        let long = Overrides {
            seq: Some(17),
            ..default
        };
        assert_eq!(
            refused("tiny-gpt2-h1", &long),
            "bench tiny-gpt2-h1: 17 tokens a row, the target has 16 positions"
        );
    }
}
