//! How autotuning decides on products, and where a decision holds.
#![expect(clippy::disallowed_methods, reason = "files of a test alone")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::emulated::{Emulated, Order, is_there};
use super::tests::{Alone, replay_on, same_bits};
use super::{Arena, Device, Executor};
use crate::op::Builder;
use crate::ops::oracle::{close, random};
use crate::step_parameters::StepParameters;
use crate::store::Store;

/// Bytes of the device: enough to measure a small product, and quick to fill.
const MEMORY: usize = 64 << 20;

/// Our own kernel for products.
const OWN: &str = "multiply_tiles";

/// A device on which our own kernel for products takes less time than cublasLt, or more.
fn paced(own: bool, cache: Option<&Path>) -> (Arc<Emulated>, Arc<Device>) {
    let emulated = Emulated::of_size(Order::new(true, true), MEMORY);
    let pace: fn(&str) -> f32 = if own {
        |function| if function == OWN { 1.0 } else { 2.0 }
    } else {
        |function| if function == OWN { 2.0 } else { 1.0 }
    };
    emulated.set_pace(pace);
    let driver = Arc::<Emulated>::clone(&emulated);
    let device = Device::with_cache(driver, cache.map(Path::to_owned));
    (emulated, device)
}

/// A training step with thin products on so many rows: a component network of twelve hidden units,
/// its gradients and a loss.
fn thin(rows: usize) -> (Builder, Store) {
    let (mut b, mut store) = (Builder::new(), Store::new());
    let mut leaf = |b: &mut Builder, name: &str, dims: &[usize]| {
        let sample = random(dims, dims.len() as u64);
        let slot = store.add(name, dims, sample.values);
        b.persistent(&store, slot)
    };
    let x = leaf(&mut b, "x", &[rows, 3]);
    let w = leaf(&mut b, "w", &[3, 1, 12]);
    let bias = leaf(&mut b, "bias", &[3, 12]);
    let square = leaf(&mut b, "square", &[rows, rows]);
    let h = b.parallel_linear(x, w, bias).unwrap();
    let product = b.matmul(square, h).unwrap();
    let wide = b.matmul(square, square).unwrap();
    let [one, other] = [product, wide].map(|value| b.sum_squares(value).unwrap());
    let gradients = b.gradients(one, &[w]).unwrap();
    b.output("gradient", gradients[0].unwrap());
    b.output("one", one);
    b.output("other", other);
    (b, store)
}

/// A replay on a device.
struct Replayed {
    /// Products by our own kernels, and by cublasLt.
    own: usize,
    library: usize,
    /// Calls of the driver while the program was planned.
    measured: usize,
    found: Vec<(String, Vec<f32>)>,
}

fn replayed(
    (emulated, device): &(Arc<Emulated>, Arc<Device>),
    (b, store): &(Builder, Store),
) -> Replayed {
    emulated.calls();
    let executor = Executor::planned(b, Some(device));
    let measured = emulated.calls().len();
    let mut executor = Alone::of(executor, device).unwrap();
    emulated.traffic();
    let parameters = StepParameters::default();
    let found = replay_on(&mut executor, &mut store.copy(), &[], &parameters).unwrap();
    let launches = emulated.traffic();
    let own = launches.iter();
    let own = own.filter(|launch| launch.function == OWN);
    Replayed {
        own: own.count(),
        library: executor.products(),
        measured,
        found,
    }
}

#[test]
fn products_take_the_fastest_way_or_our_kernels_where_cublaslt_refuses() {
    if !is_there() {
        return;
    }
    let program = thin(40);
    let plain = Emulated::new(Order::new(true, true));
    let plain = (Arc::clone(&plain), Device::of(plain));
    let expected = replayed(&plain, &program);
    let library = expected.library;
    assert!(expected.own == 0 && library > 3, "{library}");
    let same = |what: &str, found: &Replayed| {
        for ((name, found), (_, expected)) in found.found.iter().zip(&expected.found) {
            // Sums of up to 40 terms in another order.
            close(&format!("{name} {what}"), found, expected, 1e-5);
        }
    };
    // Thin products are timed both ways.
    let own = replayed(&paced(true, None), &program);
    assert!(own.own > 1 && own.library == 3 && own.own + 3 == library);
    same("by our own kernels", &own);
    assert_eq!(replayed(&paced(false, None), &program).own, 0);
    // Our kernels take over from cublasLt, with and without timings.
    for refuses in [plain, paced(false, None)] {
        refuses.0.refuse_products();
        let found = replayed(&refuses, &program);
        assert_eq!((found.own, found.library), (library, 0));
        same("where the library refuses", &found);
    }
}

#[test]
fn a_kind_is_measured_once_on_a_machine() {
    if !is_there() {
        return;
    }
    let program = thin(40);
    for own in [true, false] {
        let cache = tempdir(&format!("cache-{own}"));
        let first = replayed(&paced(own, Some(&cache)), &program);
        assert!((first.own > 0) == own && first.measured > 0);
        // A later process finds the cached measurement.
        let again = paced(!own, Some(&cache));
        let later = replayed(&again, &program);
        assert_eq!((later.own, later.measured), (first.own, 0));
        same_bits("on another day", &first.found, &later.found);
        // Another shape is another kind; a damaged cache file is ignored.
        let other = replayed(&again, &thin(44));
        assert!((other.own > 0) != own && other.measured > 0);
        for file in fs::read_dir(&cache).unwrap() {
            fs::write(file.unwrap().path(), "own").unwrap();
        }
        let damaged = replayed(&paced(!own, Some(&cache)), &program);
        assert!((damaged.own > 0) != own && damaged.measured > 0);
        fs::remove_dir_all(&cache).unwrap();
    }
}

#[test]
fn an_unmeasured_decision_holds_for_that_run_only() {
    if !is_there() {
        return;
    }
    let program = thin(40);
    let place = tempdir("no-room");
    let cache = place.join("cache");
    let record = place.join("kernels.txt");
    let (full, device) = paced(true, Some(&cache));
    device.keep_record(record.clone()).unwrap();
    let bytes = device.memory().unwrap().0 - 1000;
    let taken = Arena::new(&device, bytes).unwrap();
    Executor::planned(&program.0, Some(&device));
    drop(taken);
    let written = fs::read_to_string(&record).unwrap();
    let kinds = written.lines().skip(1);
    assert!(kinds.clone().all(|line| line.ends_with(" unmeasured")));
    let kinds = kinds.count();
    assert!(kinds > 2);
    let line = format!(
        "kinds of products without memory for trials: {kinds}; they take cublasLt's first algorithm"
    );
    assert_eq!(device.remarks(), [line]);
    // Even when memory is free again, and when the run is resumed; a new run then measures.
    assert_eq!(replayed(&(full, device), &program).own, 0);
    assert!(!cache.exists());
    let resumed = paced(true, None);
    resumed.1.keep_record(record.clone()).unwrap();
    assert_eq!(replayed(&resumed, &program).own, 0);
    assert!(resumed.1.remarks().is_empty());
    assert_eq!(fs::read_to_string(&record).unwrap(), written);
    assert!(replayed(&paced(true, Some(&cache)), &program).own > 0);
    fs::remove_dir_all(&place).unwrap();
}

#[test]
fn a_resumed_run_keeps_its_decisions() {
    if !is_there() {
        return;
    }
    let program = thin(40);
    for own in [true, false] {
        let place = tempdir(&format!("record-{own}"));
        let record = place.join("kernels.txt");
        let begun = paced(own, None);
        begun.1.keep_record(record.clone()).unwrap();
        let first = replayed(&begun, &program);
        assert_eq!(first.own > 0, own);
        // On resume the other way is faster, and this machine's cache says so.
        let cache = place.join("cache");
        let later = replayed(&paced(!own, Some(&cache)), &program);
        assert_eq!(later.own > 0, !own);
        let resumed = paced(!own, Some(&cache));
        resumed.1.keep_record(record).unwrap();
        let again = replayed(&resumed, &program);
        assert_eq!((again.own, again.measured), (first.own, 0));
        same_bits("after it was resumed", &first.found, &again.found);
        fs::remove_dir_all(&place).unwrap();
    }
}

/// First line of a record.
const TITLE: &str =
    "how this run computes its sites and products on a GPU; a resumed run goes on with it";

#[test]
fn a_bad_record_is_reported_in_one_line() {
    let place = tempdir("no-record");
    let record = place.join("kernels.txt");
    let kind = "0".repeat(32);
    for (text, found) in [
        ("", "another first line".to_owned()),
        (&format!("{TITLE}\nabc own\n"), "`abc own`".to_owned()),
        (&format!("{TITLE}\nabc site\n"), "`abc site`".to_owned()),
        (&format!("{TITLE}\n{kind} fast\n"), format!("`{kind} fast`")),
    ] {
        fs::write(&record, text).unwrap();
        let (_, device) = paced(true, None);
        let line = device.keep_record(record.clone()).unwrap_err().to_string();
        assert_eq!(
            line,
            format!(
                "{}: expected the run's autotuning decisions, found {found}; restore the file, or start over with --fresh",
                record.display()
            )
        );
    }
    fs::remove_dir_all(&place).unwrap();
}

#[test]
fn decisions_about_sites_in_an_older_record_are_ignored() {
    let place = tempdir("older-record");
    let record = place.join("kernels.txt");
    let words = ["site", "products", "products unmeasured", "own"];
    let lines = (0..)
        .zip(words)
        .map(|(kind, word)| format!("{kind:032x} {word}\n"));
    fs::write(&record, format!("{TITLE}\n{}", lines.collect::<String>())).unwrap();
    let (_, device) = paced(true, None);
    device.keep_record(record).unwrap();
    fs::remove_dir_all(&place).unwrap();
}

#[test]
fn a_recorded_algorithm_that_cublaslt_refuses_is_replaced_by_its_first() {
    if !is_there() {
        return;
    }
    let program = thin(40);
    let place = tempdir("refused");
    let record = place.join("kernels.txt");
    let begun = paced(false, None);
    begun.1.keep_record(record.clone()).unwrap();
    let first = replayed(&begun, &program);
    assert!(first.own == 0 && begun.1.remarks().is_empty());
    let [listed, unknown] = ["0", "1"].map(|digit| format!("cublaslt-{}", digit.repeat(128)));
    let written = fs::read_to_string(&record).unwrap();
    let kinds = written.matches(&listed).count();
    fs::write(&record, written.replace(&listed, &unknown)).unwrap();
    let resumed = paced(false, None);
    resumed.1.keep_record(record.clone()).unwrap();
    let again = replayed(&resumed, &program);
    assert_eq!((again.own, again.library), (0, first.library));
    same_bits("by the first algorithm", &first.found, &again.found);
    let line = format!(
        "recorded algorithms that cublasLt refuses: {kinds}; its first algorithm is taken, with which last bits may differ"
    );
    assert_eq!(resumed.1.remarks(), [line]);
    let replaced = written.replace(&listed, &format!("{listed} unmeasured"));
    assert_eq!(fs::read_to_string(&record).unwrap(), replaced);
    // Where it has none, our own kernels compute the products.
    fs::write(&record, written.replace(&listed, &unknown)).unwrap();
    let refuses = paced(false, None);
    refuses.0.refuse_products();
    refuses.1.keep_record(record).unwrap();
    assert_eq!(replayed(&refuses, &program).own, first.library);
    fs::remove_dir_all(&place).unwrap();
}

fn tempdir(name: &str) -> PathBuf {
    let place = std::env::temp_dir().join(format!("spd-autotune-{name}-{}", std::process::id()));
    fs::create_dir_all(&place).unwrap();
    place
}
