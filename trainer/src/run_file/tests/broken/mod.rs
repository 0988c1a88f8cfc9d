//! Broken run files, and the exact words each is refused with.

mod keys;
mod overrides;
mod several;
mod terms;
mod together;
mod values;

use crate::run_file::Run;

use crate::run_file::tests::{GPT2, LLAMA, RESID_MLP, TMS, load};

type Texts = &'static [&'static str];
/// Each text is replaced by the other.
type Edits = &'static [(&'static str, &'static str)];

/// What is done to a good file, and what is said of it.
struct Case {
    file: &'static str,
    edits: Edits,
    overrides: Texts,
    faults: Texts,
}

fn edited(file: &'static str, edits: Edits, faults: Texts) -> Case {
    Case {
        file,
        edits,
        overrides: &[],
        faults,
    }
}

fn overridden(file: &'static str, overrides: Texts, faults: Texts) -> Case {
    Case {
        file,
        edits: &[],
        overrides,
        faults,
    }
}

fn toy(edits: Edits, faults: Texts) -> Case {
    edited(TMS, edits, faults)
}

fn tiny(edits: Edits, faults: Texts) -> Case {
    edited(GPT2, edits, faults)
}

fn llama(edits: Edits, faults: Texts) -> Case {
    edited(LLAMA, edits, faults)
}

fn resid(edits: Edits, faults: Texts) -> Case {
    edited(RESID_MLP, edits, faults)
}

fn toy_with(overrides: Texts, faults: Texts) -> Case {
    overridden(TMS, overrides, faults)
}

fn tiny_with(overrides: Texts, faults: Texts) -> Case {
    overridden(GPT2, overrides, faults)
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

#[test]
fn a_run_file_longer_than_any_is_refused_before_it_is_read() {
    // Holes, and longer than any memory.
    let dir = tempfile::tempdir().unwrap();
    for name in ["run.toml", "run.yaml"] {
        let path = dir.path().join(name);
        let file = std::fs::File::create_new(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        assert_eq!(
            Run::load(&path, &[]).unwrap_err().to_string(),
            format!(
                "{}: expected a run file of at most 1048576 bytes, found more; is it one?",
                path.display()
            )
        );
    }
}
