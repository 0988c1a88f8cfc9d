//! Files that arrive in pieces, changed, twice or from another host.

use std::iter;
use std::time::Duration;

use super::server::{Answer, Asked, Server};
use super::{House, assert_whole, files, is_listing, is_weights};

#[test]
fn interrupted_transfer_is_resumed() {
    // Three pieces by three connections.
    let house = House::new(|asked| match is_weights(asked) && asked.number < 2 {
        true => Answer::Cut(1_000_000),
        false => Answer::Right,
    });
    assert_whole(&house.fetch().unwrap());
    let starts: Vec<usize> = house.asked_for_weights().iter().map(|a| a.start).collect();
    assert_eq!(starts, [0, 1_000_000, 2_000_000]);

    // A server without ranges sends the whole file.
    let house = House::new(|asked| match (is_weights(asked), asked.number) {
        (true, 0) => Answer::Cut(1_000_000),
        (true, _) => Answer::FromTheStart,
        _ => Answer::Right,
    });
    assert_whole(&house.fetch().unwrap());

    // Every connection is cut at once: bytes that came stay for another start.
    let house = House::new(|asked| match (is_weights(asked), asked.number) {
        (true, 0) => Answer::Cut(500),
        (true, 1..=2) => Answer::Cut(0),
        _ => Answer::Right,
    });
    let line = house.fetch().unwrap_err();
    let end = "500 of 2800000 bytes are kept; the same command resumes there";
    assert!(line.ends_with(end), "{line}");
    assert_whole(&house.fetch().unwrap());
    assert_eq!(house.asked_for_weights().last().unwrap().start, 500);
}

#[test]
fn a_hub_that_drips_is_given_up() {
    // One byte a try.
    let house = House::new(|asked| match is_weights(asked) {
        true => Answer::Cut(1),
        false => Answer::Right,
    });
    assert_eq!(
        house.fetch().unwrap_err(),
        "hf://o/n@main: model.safetensors: the transfer breaks off: Peer disconnected; 3 of 2800000 bytes are kept; the same \
         command resumes there"
    );
    assert_eq!(house.asked_for_weights().len(), 3);
    // Single bytes, never silent for long; of the listing too.
    let drips = |asked: &Asked, of: fn(&Asked) -> bool| match of(asked) {
        true => Answer::Dripped(Duration::from_millis(20)),
        false => Answer::Right,
    };
    for (of, what) in [
        (
            is_weights as fn(&Asked) -> bool,
            ": model.safetensors: the transfer",
        ),
        (is_listing, ": the answer"),
    ] {
        // On a busy machine two bytes may be more than two seconds apart.
        let tries = iter::repeat_with(|| {
            let house = House::new(move |asked| drips(asked, of)).impatient();
            let line = house.fetch().unwrap_err();
            (house, line)
        });
        let mut tries = tries.take(30);
        let (house, line) = tries
            .find(|(_, line)| !line.contains("it is silent"))
            .expect("bytes within two seconds of each other");
        let start = format!("hf://o/n@main{what} breaks off: ");
        assert!(
            line.starts_with(&start) && line.contains(" s are too few; "),
            "{line}"
        );
        assert_eq!(
            house
                .server
                .asked()
                .iter()
                .filter(|asked| of(asked))
                .count(),
            3
        );
    }
}

#[test]
fn other_bytes_are_never_taken() {
    let changed = || {
        let mut bytes = files().swap_remove(2).1;
        bytes[1_234_567] ^= 1;
        bytes
    };
    let house = House::new(move |asked| match is_weights(asked) {
        true => Answer::Other(changed()),
        false => Answer::Right,
    });
    for _ in 0..2 {
        let line = house.fetch().unwrap_err();
        let start = "hf://o/n@main: model.safetensors: the hub promises the hash ";
        assert!(line.starts_with(start), "{line}");
        assert!(
            line.ends_with("; try again, and mind what stands between here and HOST"),
            "{line}"
        );
    }
    // Begun by a wrong server, and made again by a right one.
    let house = House::new(move |asked| match (is_weights(asked), asked.number) {
        (true, 0) => Answer::Other(vec![7; 1000]),
        _ => Answer::Right,
    });
    assert_whole(&house.fetch().unwrap());
    let longer = House::new(|asked| match is_weights(asked) {
        true => Answer::Other(vec![7; 3_000_000]),
        false => Answer::Right,
    });
    assert_eq!(
        longer.fetch().unwrap_err(),
        "hf://o/n@main: model.safetensors: the hub promises 2800000 bytes, and more come; try again later"
    );
    let config = House::new(|asked| match asked.path.ends_with("/config.json") {
        true => Answer::Other(b"{\"model_type\": \"gpt3\"}".to_vec()),
        false => Answer::Right,
    });
    let line = config.fetch().unwrap_err();
    assert!(
        line.starts_with("hf://o/n@main: config.json: the hub promises the hash "),
        "{line}"
    );
}

#[test]
fn the_token_is_for_the_hub_alone() {
    let files_there = Server::start(files(), |_| Answer::Right);
    // Another name of this machine is another host.
    let elsewhere = files_there.endpoint.replace("127.0.0.1", "localhost");
    let to = elsewhere.clone();
    let house = House::new(move |asked| match is_weights(asked) {
        true => Answer::Status(302, format!("Location: {to}{}\r\n", asked.path)),
        false => Answer::Right,
    });
    assert_whole(&house.fetch().unwrap());
    // Another port is another origin.
    let to = files_there.endpoint.clone();
    let house = House::new(move |asked| match is_weights(asked) {
        true => Answer::Status(307, format!("Location: {to}{}\r\n", asked.path)),
        false => Answer::Right,
    });
    assert_whole(&house.fetch().unwrap());
    let asked = files_there.asked();
    let tokens: Vec<_> = asked.iter().map(|asked| asked.token.as_deref()).collect();
    assert_eq!(tokens, [None, None]);
    // The token is sent within the hub's origin.
    let house = House::new(|asked| match is_weights(asked) && asked.number == 0 {
        true => Answer::Status(302, format!("Location: {}\r\n", asked.path)),
        false => Answer::Right,
    });
    assert_whole(&house.fetch().unwrap());
    let of_me = format!("Bearer {}", super::TOKEN);
    for asked in house.asked_for_weights() {
        assert_eq!(asked.token.as_deref(), Some(&*of_me));
    }
    // A redirect to nowhere, to itself, or to an invalid address.
    for location in [
        "",
        "Location: model.safetensors\r\n",
        "Location: ftp://h/x\r\n",
    ] {
        let house = House::new(move |asked| match is_weights(asked) {
            true => Answer::Status(302, location.to_owned()),
            false => Answer::Right,
        });
        let line = house.fetch().unwrap_err();
        let start = "hf://o/n@main: model.safetensors: no answer from HOST: ";
        assert!(line.starts_with(start), "{location:?} {line}");
    }
}

#[test]
fn two_that_want_the_same_file_ask_for_it_once() {
    let house = House::new(|asked| match is_weights(asked) && asked.number == 0 {
        true => Answer::Silent(1_000_000),
        false => Answer::Right,
    })
    .impatient();
    std::thread::scope(|scope| {
        let both = [(), ()].map(|()| scope.spawn(|| house.fetch().unwrap()));
        for dir in both {
            assert_whole(&dir.join().unwrap());
        }
    });
    // The first was cut and continues; the second waits.
    assert_eq!(house.asked_for_weights().len(), 2);
}
