//! `spd-launch tokenize`: makes a token dataset from text, JSON lines or parquet.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanCount};
use spd_dataloader::{DataError, Report, Tokenize, TokenizerChoice, Watch};
use spd_hub::SCHEME;
use spd_trainer::Fault;

use crate::cli::TokenizeArgs;
use crate::exit::Exit;
use crate::table::{Align, Table};
use crate::{hub, screen, stop};

/// Makes the datasets.
///
/// # Errors
///
/// Bad input, as the dataloader reports it; the output directory is then unchanged.
pub(crate) fn tokenize(asked: &TokenizeArgs) -> Result<Exit, Fault> {
    let tokenizer = match asked.tokenizer.as_str() {
        "bytes" => TokenizerChoice::Bytes,
        name if name.starts_with(SCHEME) => TokenizerChoice::File(hub::tokenizer(name)?),
        path => TokenizerChoice::File(path.into()),
    };
    let options = options(asked, tokenizer);
    let watch = Watch {
        stop: stop::flag(),
        ..Watch::default()
    };
    let (ended, is_over) = mpsc::channel();
    let made = thread::scope(|scope| {
        let watch = &watch;
        scope.spawn(move || show(watch, &is_over));
        let made = spd_dataloader::tokenize(&options, watch);
        drop(ended);
        made
    });
    match made {
        Ok(report) => screen::result(&text(&options, &report)),
        Err(DataError::Asked) => {
            screen::end("stopped; the same command goes on");
            return Ok(Exit::Stopped);
        }
        Err(error) => return Err(Fault::BadInput(error.to_string())),
    }
    Ok(Exit::Done)
}

/// Shows progress until `is_over`: continuously on a terminal, else once a minute.
fn show(watch: &Watch, is_over: &Receiver<()>) {
    let (started, is_live) = (Instant::now(), screen::is_live());
    let often = Duration::from_millis(if is_live { 200 } else { 60_000 });
    while is_over.recv_timeout(often) == Err(RecvTimeoutError::Timeout) {
        let [done, total] =
            [&watch.done, &watch.total].map(|bytes| HumanBytes(bytes.load(Ordering::Relaxed)));
        let seconds = started.elapsed().as_secs();
        let line = match total.0 {
            0 => format!("measuring the text, {seconds} s"),
            _ => format!("tokenized {done} of {total}, {seconds} s"),
        };
        match is_live {
            true => screen::live(vec![line]),
            false => screen::progress(&line),
        }
    }
    if is_live {
        screen::live(Vec::new());
    }
}

fn options(asked: &TokenizeArgs, tokenizer: TokenizerChoice) -> Tokenize {
    let plain = Tokenize::new(asked.files.clone(), asked.out.clone());
    Tokenize {
        tokenizer,
        separator: asked.separator.clone(),
        eos: asked.eos.clone(),
        column: asked.column.clone().unwrap_or(plain.column),
        held_out: asked.val_fraction.unwrap_or(plain.held_out),
        shard_tokens: asked.shard_tokens.unwrap_or(plain.shard_tokens),
        threads: asked.threads,
        overwrite: asked.overwrite,
        ..plain
    }
}

fn text(options: &Tokenize, report: &Report) -> String {
    let mut table = Table::new(&[Align::Left, Align::Right]);
    for (split, tokens) in [("train", report.train_tokens), ("val", report.val_tokens)] {
        if tokens > 0 {
            let place = options.out.join(split);
            table.row([
                format!("{}", place.display()),
                HumanCount(tokens).to_string(),
                "tokens".into(),
            ]);
        }
    }
    format!(
        "{}  {} of text in {:.1} s, vocabulary of {}\n",
        table.text(),
        HumanBytes(report.bytes),
        report.seconds,
        HumanCount(u64::from(report.vocab))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_says_where_the_datasets_are() {
        let report = Report {
            train_tokens: 1_003_854,
            val_tokens: 111_540,
            vocab: 256,
            seconds: 0.25,
            bytes: 1 << 20,
        };
        let options = Tokenize::new(vec!["a.txt".into()], "data/a".into());
        assert_eq!(
            text(&options, &report),
            "  data/a/train  1,003,854  tokens\n  data/a/val      111,540  tokens\n  \
             1.00 MiB of text in 0.2 s, vocabulary of 256\n"
        );
    }
}
