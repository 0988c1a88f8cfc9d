//! Broken run files, and the exact words each is refused with.

mod keys;
mod overrides;
mod several;
mod terms;
mod together;
mod values;

use crate::{GPT2, LLAMA, RESID_MLP, TMS, load};

/// What is done to a good file, and what is said of it.
struct Case {
    file: &'static str,
    /// Each text is replaced by the other.
    edits: &'static [(&'static str, &'static str)],
    overrides: &'static [&'static str],
    faults: &'static [&'static str],
}

fn toy(edits: &'static [(&'static str, &'static str)], faults: &'static [&'static str]) -> Case {
    Case {
        file: TMS,
        edits,
        overrides: &[],
        faults,
    }
}

fn tiny(edits: &'static [(&'static str, &'static str)], faults: &'static [&'static str]) -> Case {
    Case {
        file: GPT2,
        edits,
        overrides: &[],
        faults,
    }
}

fn llama(edits: &'static [(&'static str, &'static str)], faults: &'static [&'static str]) -> Case {
    Case {
        file: LLAMA,
        edits,
        overrides: &[],
        faults,
    }
}

fn toy_with(overrides: &'static [&'static str], faults: &'static [&'static str]) -> Case {
    Case {
        file: TMS,
        edits: &[],
        overrides,
        faults,
    }
}

fn tiny_with(overrides: &'static [&'static str], faults: &'static [&'static str]) -> Case {
    Case {
        file: GPT2,
        edits: &[],
        overrides,
        faults,
    }
}

fn resid(edits: &'static [(&'static str, &'static str)], faults: &'static [&'static str]) -> Case {
    Case {
        file: RESID_MLP,
        edits,
        overrides: &[],
        faults,
    }
}

fn said(case: &Case) -> Vec<String> {
    let mut text = case.file.to_owned();
    for (old, new) in case.edits {
        assert!(text.contains(old), "{old} is not in\n{text}");
        text = text.replacen(old, new, 1);
    }
    match load(text.as_bytes(), case.overrides) {
        Ok(run) => panic!("{:?} {:?} made {run:?}", case.edits, case.overrides),
        Err(faults) => faults.lines().map(str::to_owned).collect(),
    }
}

fn assert_said(cases: &[Case]) {
    for case in cases {
        assert_eq!(
            said(case),
            case.faults,
            "{:?} {:?}",
            case.edits,
            case.overrides
        );
    }
}
