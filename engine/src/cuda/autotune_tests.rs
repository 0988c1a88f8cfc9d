//! Which sites of a program are found, and how autotuning decides on sites and products.
#![expect(clippy::disallowed_methods, reason = "files of a test alone")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::emulated::{Emulated, Order, is_there};
use super::program::Program;
use super::tests::{Alone, on, replay_on, same_bits};
use super::{Arena, Device, Executor, sites};
use crate::builder::BACKWARD;
use crate::cuda::casts::{rounded_wherever_possible, stored};
use crate::cuda::device_op::{DeviceGraph, on_device};
use crate::cuda::site::tests::{EVEN, Made, RAGGED, numbers, square};
use crate::derivation::SiteInputs;
use crate::op::Builder;
use crate::ops::oracle::random;
use crate::ops::{Mask, MaskValues};
use crate::store::Store;
use crate::value::{Type, Value};

fn names(b: &DeviceGraph) -> Vec<&'static str> {
    let order = crate::schedule::order(b).into_iter();
    order.map(|node| b.nodes[node].op.name()).collect()
}

fn count(names: &[&str], name: &str) -> usize {
    names.iter().filter(|found| **found == name).count()
}

fn sites_of(b: &Builder) -> Vec<&'static str> {
    let b = rounded_wherever_possible(b);
    names(&sites::fused(&b, |_| true))
}

#[test]
fn intermediates_of_a_fused_site_are_gone() {
    let made = EVEN.build(false);
    let names = sites_of(&made.b);
    for (name, times) in [
        ("site", 2),
        ("site_grad", 2),
        ("site_sums", 4),
        ("masked", 0),
        ("masked_grad", 0),
    ] {
        assert_eq!(count(&names, name), times, "{name} of {names:?}");
    }
    // Activations and masked activations of each site were stored for the backward pass.
    let large = square(128);
    let b = stored(&large.build(false).b);
    let [one, several] = [true, false].map(|one| Program::of(&b, |_, _| one).plan.live_bytes());
    assert!(
        one + 2 * 2 * large.rows * large.c <= several,
        "{one} {several}"
    );
}

/// Further use of the activations, the masked activations and the deltas of a site.
type Also = dyn Fn(&mut Builder, [Value; 3]);

/// Op names of a program with a site whose intermediates `also` uses.
fn beside(also: &Also) -> Vec<&'static str> {
    let mut b = Builder::new();
    let mut store = Store::of_shapes();
    let mut leaf = |b: &mut Builder, name: &str, dims: &[usize]| {
        let slot = store.zeros(name, dims);
        b.persistent(&store, slot)
    };
    let x = leaf(&mut b, "x", &[64, 32]);
    let (v, u) = (leaf(&mut b, "v", &[32, 96]), leaf(&mut b, "u", &[96, 32]));
    let g = leaf(&mut b, "g", &[64, 96]);
    let delta = leaf(&mut b, "delta", &[64]);
    let a = b.matmul(x, v).unwrap();
    let with = MaskValues {
        mask: Mask::Importance,
        importance: Some(g),
        given: None,
        delta: Some(delta),
        route: None,
    };
    let h = b.masked(a, &with).unwrap();
    let with = SiteInputs {
        clean: Some(x),
        delta: Some(delta),
        ..SiteInputs::default()
    };
    let y = b.site_output(h, u, &with).unwrap();
    b.output("y", y);
    also(&mut b, [a, h, delta]);
    sites_of(&b)
}

#[test]
fn a_site_whose_intermediates_are_used_stays_products() {
    assert_eq!(count(&beside(&|_, _| {}), "site"), 1);
    // Activations or masked activations are inputs of another op, or outputs.
    let read: [&Also; 4] = [
        &|b, [a, ..]| {
            let other = b.relu(a).unwrap();
            b.output("other", other);
        },
        &|b, [_, h, _]| {
            let other = b.relu(h).unwrap();
            b.output("other", other);
        },
        &|b, [a, ..]| b.output("a", a),
        // The gradient of deltas is a sum over all components.
        &|b, [.., delta]| {
            let (_, y) = b.outputs[0].clone();
            let loss = b.sum_squares(y).unwrap();
            let gradient = b.gradients(loss, &[delta]).unwrap()[0].unwrap();
            b.output("gradient", gradient);
        },
    ];
    for also in read {
        let names = beside(also);
        assert_eq!(count(&names, "site"), 0, "{names:?}");
    }
}

#[test]
fn f32_programs_have_no_fused_sites() {
    let made = EVEN.build(false);
    assert!(sites::sites(&on_device(&made.b)).is_empty());
}

#[test]
fn an_op_of_a_site_reports_its_cost() {
    let b = stored(&EVEN.build(false).b);
    let found = sites::sites(&b);
    assert_eq!(found.len(), 2);
    for (_, node) in found.iter().flat_map(|site| &site.fused) {
        let types: Vec<&Type> = node.inputs.iter().map(|&value| b.ty(value)).collect();
        assert!(node.op.flops(&types) > 0);
        let backward = node.part == BACKWARD;
        assert_eq!(backward, node.op.name() != "site");
    }
}

/// Bytes of the device: enough to measure a small site, and quick to fill.
const MEMORY: usize = 64 << 20;

/// A device on which a site takes less time as one op, or more.
fn paced(one: bool, cache: Option<&Path>) -> (Arc<Emulated>, Arc<Device>) {
    let emulated = Emulated::of_size(Order::new(true, true), MEMORY);
    emulated.set_pace(if one {
        |function| {
            if function.starts_with("site") {
                1.0
            } else {
                5.0
            }
        }
    } else {
        |function| {
            if function.starts_with("site") {
                50.0
            } else {
                1.0
            }
        }
    });
    let driver = Arc::<Emulated>::clone(&emulated);
    let device = Device::with_cache(driver, cache.map(Path::to_owned));
    (emulated, device)
}

/// Whether a program has its sites as one op each, the launches of its trials, and its results.
fn planned(
    made: &Made,
    (emulated, device): &(Arc<Emulated>, Arc<Device>),
) -> (bool, usize, Vec<(String, Vec<f32>)>) {
    emulated.calls();
    let executor = Executor::stored(&stored(&made.b), device);
    let measured = emulated.calls().len();
    let mut executor = Alone::of(executor, device).unwrap();
    emulated.traffic();
    let mut store = made.store.copy();
    let found = replay_on(&mut executor, &mut store, &made.inputs, &numbers()).unwrap();
    let traffic = emulated.traffic();
    let one = traffic.iter().any(|launch| launch.function == "site_rows");
    assert_ne!(
        one,
        traffic.iter().any(|launch| launch.function == "masked")
    );
    (one, measured, found)
}

#[test]
fn the_faster_way_is_chosen_and_measured_once() {
    if !is_there() {
        return;
    }
    let made = RAGGED.build(true);
    for faster in [true, false] {
        let cache = tempdir(&format!("choices-{faster}"));
        let device = paced(faster, Some(&cache));
        let (one, measured, found) = planned(&made, &device);
        assert_eq!(one, faster);
        assert!(measured > 0);
        // A later process finds the cached measurement.
        let again = paced(!faster, Some(&cache));
        let (one, measured, other) = planned(&made, &again);
        assert_eq!((one, measured), (faster, 0));
        same_bits("on another day", &found, &other);
        // Another shape is another kind; a damaged cache file is ignored.
        let (one, measured, _) = planned(&EVEN.build(true), &again);
        assert!(one != faster && measured > 0);
        for file in fs::read_dir(&cache).unwrap() {
            fs::write(file.unwrap().path(), "site").unwrap();
        }
        let (one, measured, _) = planned(&made, &paced(!faster, Some(&cache)));
        assert!(one != faster && measured > 0);
        fs::remove_dir_all(&cache).unwrap();
    }
}

#[test]
fn an_unmeasured_decision_holds_for_that_run_only() {
    if !is_there() {
        return;
    }
    let made = RAGGED.build(true);
    let place = tempdir("no-room");
    let cache = place.join("cache");
    let record = place.join("kernels.txt");
    let (full, device) = paced(true, Some(&cache));
    device.keep_record(record.clone()).unwrap();
    let bytes = device.memory().unwrap().0 - 1000;
    let taken = Arena::new(&device, bytes).unwrap();
    Executor::stored(&stored(&made.b), &device);
    drop(taken);
    let written = fs::read_to_string(&record).unwrap();
    let kinds = written.lines().skip(1).count();
    assert!(
        kinds > 2
            && written
                .lines()
                .skip(1)
                .all(|line| line.ends_with(" unmeasured"))
    );
    let line = format!(
        "kinds of sites and products without memory for trials: {kinds}; sites are separate products, and products take cublasLt's first algorithm"
    );
    assert_eq!(device.remarks(), [line]);
    // Even when memory is free again, and when the run is resumed; a new run then measures.
    let (one, ..) = planned(&made, &(full, device));
    assert!(!one && !cache.exists());
    let resumed = paced(true, None);
    resumed.1.keep_record(record.clone()).unwrap();
    assert!(!planned(&made, &resumed).0 && resumed.1.remarks().is_empty());
    assert_eq!(fs::read_to_string(&record).unwrap(), written);
    let (one, ..) = planned(&made, &paced(true, Some(&cache)));
    assert!(one);
    fs::remove_dir_all(&place).unwrap();
}

#[test]
fn a_resumed_run_keeps_its_decisions() {
    if !is_there() {
        return;
    }
    let made = RAGGED.build(true);
    for begun in [true, false] {
        let place = tempdir(&format!("record-{begun}"));
        let record = place.join("kernels.txt");
        let first = paced(begun, None);
        first.1.keep_record(record.clone()).unwrap();
        let (one, _, found) = planned(&made, &first);
        assert_eq!(one, begun);
        // On resume the other way is faster, and this machine's cache says so.
        let cache = place.join("cache");
        let later = paced(!begun, Some(&cache));
        assert_eq!(planned(&made, &later).0, !begun);
        let resumed = paced(!begun, Some(&cache));
        resumed.1.keep_record(record).unwrap();
        let (one, measured, again) = planned(&made, &resumed);
        assert_eq!((one, measured), (begun, 0));
        same_bits("after it was resumed", &found, &again);
        fs::remove_dir_all(&place).unwrap();
    }
}

#[test]
fn a_bad_record_is_reported_in_one_line() {
    let place = tempdir("no-record");
    let record = place.join("kernels.txt");
    let title =
        "how this run computes its sites and products on a GPU; a resumed run goes on with it";
    for (text, found) in [
        ("", "another first line".to_owned()),
        (&format!("{title}\nabc site\n"), "`abc site`".to_owned()),
        (
            &format!("{title}\n{} fast\n", "0".repeat(32)),
            format!("`{} fast`", "0".repeat(32)),
        ),
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

/// A training step with thin products: a component network of twelve hidden units, its gradients
/// and a loss.
fn thin() -> (Builder, Store) {
    let (mut b, mut store) = (Builder::new(), Store::new());
    let mut leaf = |b: &mut Builder, name: &str, dims: &[usize]| {
        let sample = random(dims, dims.len() as u64);
        let slot = store.add(name, dims, sample.values);
        b.persistent(&store, slot)
    };
    let x = leaf(&mut b, "x", &[40, 3]);
    let w = leaf(&mut b, "w", &[3, 1, 12]);
    let bias = leaf(&mut b, "bias", &[3, 12]);
    let square = leaf(&mut b, "square", &[40, 40]);
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

/// Launches of products by our own kernels and by cublasLt, and the results.
fn products(
    (emulated, device): &(Arc<Emulated>, Arc<Device>),
    (b, store): &(Builder, Store),
) -> (usize, usize, Vec<(String, Vec<f32>)>) {
    let mut executor = on(device, b).unwrap();
    emulated.traffic();
    let found = replay_on(&mut executor, &mut store.copy(), &[], &numbers()).unwrap();
    let own = emulated.traffic();
    let own = own
        .iter()
        .filter(|launch| launch.function == "multiply_tiles");
    (own.count(), executor.products(), found)
}

#[test]
fn products_take_the_fastest_way_or_our_kernels_where_cublaslt_refuses() {
    if !is_there() {
        return;
    }
    let program = thin();
    let plain = Emulated::new(Order::new(true, true));
    let plain = (Arc::clone(&plain), Device::of(plain));
    let (own, library, expected) = products(&plain, &program);
    assert!(own == 0 && library > 3, "{library}");
    let close = |what: &str, found: &[(String, Vec<f32>)]| {
        for ((name, found), (_, expected)) in found.iter().zip(&expected) {
            // Sums of up to 40 terms in another order.
            crate::ops::oracle::close(&format!("{name} {what}"), found, expected, 1e-5);
        }
    };
    // Thin products are timed both ways.
    let place = tempdir("products");
    let with_pace = |pace: fn(&str) -> f32| {
        let emulated = Emulated::of_size(Order::new(true, true), MEMORY);
        emulated.set_pace(pace);
        let driver = Arc::<Emulated>::clone(&emulated);
        (
            emulated,
            Device::with_cache(driver, Some(place.join("cache"))),
        )
    };
    let fast = |function: &str| {
        if function == "multiply_tiles" {
            1.0
        } else {
            2.0
        }
    };
    let slow = |function: &str| {
        if function == "multiply_tiles" {
            2.0
        } else {
            1.0
        }
    };
    let first = with_pace(fast);
    first.1.keep_record(place.join("kernels.txt")).unwrap();
    let (own, wide, found) = products(&first, &program);
    assert!(
        own > 1 && wide == 3 && own + wide == library,
        "{own} {wide}"
    );
    close("by our own kernels", &found);
    // This machine's cache holds; without it the other way is faster; a run keeps its first
    // decision.
    assert_eq!(products(&with_pace(slow), &program).0, own);
    fs::remove_dir_all(place.join("cache")).unwrap();
    assert_eq!(products(&with_pace(slow), &program).0, 0);
    let resumed = with_pace(slow);
    resumed.1.keep_record(place.join("kernels.txt")).unwrap();
    let (again, _, same) = products(&resumed, &program);
    assert_eq!(again, own);
    same_bits("after it was resumed", &found, &same);
    // Our kernels take over from cublasLt, with and without timings.
    for refuses in [plain, with_pace(slow)] {
        fs::remove_dir_all(place.join("cache")).ok();
        refuses.0.refuse_products();
        let (own, left, found) = products(&refuses, &program);
        assert_eq!((own, left), (library, 0));
        close("where the library refuses", &found);
    }
    fs::remove_dir_all(&place).unwrap();
}

#[test]
fn a_recorded_algorithm_that_cublaslt_refuses_is_replaced_by_its_first() {
    if !is_there() {
        return;
    }
    let program = thin();
    let place = tempdir("refused");
    let record = place.join("kernels.txt");
    let begun = paced(true, None);
    begun.1.keep_record(record.clone()).unwrap();
    let (own, library, expected) = products(&begun, &program);
    assert!(own == 0 && begun.1.remarks().is_empty());
    let [listed, unknown] = ["0", "1"].map(|digit| format!("cublaslt-{}", digit.repeat(128)));
    let written = fs::read_to_string(&record).unwrap();
    let kinds = written.matches(&listed).count();
    fs::write(&record, written.replace(&listed, &unknown)).unwrap();
    let resumed = paced(true, None);
    resumed.1.keep_record(record.clone()).unwrap();
    let (own, again, found) = products(&resumed, &program);
    assert_eq!((own, again), (0, library));
    same_bits("by the first algorithm", &found, &expected);
    let line = format!(
        "recorded algorithms that cublasLt refuses: {kinds}; its first algorithm is taken, with which last bits may differ"
    );
    assert_eq!(resumed.1.remarks(), [line]);
    let replaced = written.replace(&listed, &format!("{listed} unmeasured"));
    assert_eq!(fs::read_to_string(&record).unwrap(), replaced);
    // Where it has none, our own kernels compute the products.
    fs::write(&record, written.replace(&listed, &unknown)).unwrap();
    let refuses = paced(true, None);
    refuses.0.refuse_products();
    refuses.1.keep_record(record).unwrap();
    assert_eq!(products(&refuses, &program).0, library);
    fs::remove_dir_all(&place).unwrap();
}

fn tempdir(name: &str) -> PathBuf {
    let place = std::env::temp_dir().join(format!("spd-site-{name}-{}", std::process::id()));
    fs::create_dir_all(&place).unwrap();
    place
}
