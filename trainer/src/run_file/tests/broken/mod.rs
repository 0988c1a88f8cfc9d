//! Broken run files, and the exact words each is refused with.

use crate::run_file::Run;

use crate::run_file::tests::{GPT2, LLAMA, RESID_MLP, TMS, load, stories::stories};

fn assert_said(text: &'static str) {
    for story in stories(text) {
        let file = match story.file {
            "toy" => TMS,
            "tiny" => GPT2,
            "llama" => LLAMA,
            "resid" => RESID_MLP,
            other => panic!("no file is called {other}"),
        };
        match load(&story.edited(file), &story.set) {
            Ok(run) => panic!("{story:?} made {run:?}"),
            Err(faults) => assert_eq!(faults.lines().collect::<Vec<_>>(), story.said, "{story:?}"),
        }
    }
}

#[test]
fn a_wrong_key_is_named_with_the_key_it_was_meant_to_be() {
    assert_said(include_str!("keys.txt"));
}

#[test]
fn a_wrong_value_is_reported_with_the_expected_one() {
    assert_said(include_str!("values.txt"));
}

#[test]
fn all_faults_are_reported_at_once_in_file_order() {
    assert_said(include_str!("several.txt"));
}

#[test]
fn an_override_is_refused_as_a_key_of_the_file_would_be() {
    assert_said(include_str!("overrides.txt"));
}

#[test]
fn values_that_do_not_go_together_are_refused() {
    assert_said(include_str!("together.txt"));
}

#[test]
fn a_second_stream_that_does_not_fit_is_refused() {
    assert_said(include_str!("streams.txt"));
}

#[test]
fn a_term_is_refused_by_the_key_that_is_wrong() {
    assert_said(include_str!("terms.txt"));
}

#[test]
fn a_penalty_is_refused_by_what_it_lacks() {
    assert_said(include_str!("penalties.txt"));
}

#[test]
fn knots_are_refused_where_they_do_not_rise_or_are_none() {
    assert_said(include_str!("knots.txt"));
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
