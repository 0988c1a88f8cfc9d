//! Probes on the emulated device, and their messages for wrong numbers.

use std::sync::Arc;

use super::{PROBES, compile, copies, graph, nccl, primitives, same};
use crate::cuda::Device;
use crate::cuda::emulated::{Emulated, Ignored, Order, is_there};
use crate::cuda::libraries::Library;

fn emulated(order: Order) -> (Arc<Emulated>, Arc<Device>) {
    let emulated = Emulated::new(order);
    let device = Device::of(Arc::<Emulated>::clone(&emulated));
    (emulated, device)
}

#[test]
fn primitives_match_the_cpu() {
    if !is_there() {
        return;
    }
    for backwards in [false, true] {
        let (emulated, device) = emulated(Order::new(false, false));
        emulated.turn(backwards);
        for primitive in primitives::all() {
            let said = primitive.on(&device).unwrap();
            assert!(said.contains(" numbers as on the CPU, "), "{said}");
        }
        drop(device);
        assert!(emulated.is_empty());
    }
}

// By hand: the first word of the first lane is the numbers 0 and 1, and the first number that is
// copied later is the 248th; e^(-2020 / 23.5).
#[test]
fn a_wrong_number_is_reported_with_the_expected_one() {
    let refused = |primitive: primitives::Primitive, word: u32| {
        primitive.compare(&[word]).unwrap_err().to_string()
    };
    let one = 0x3f80 << 16;
    assert_eq!(
        primitives::ldmatrix().compare(&[one]).unwrap(),
        "1 numbers as on the CPU, bit for bit"
    );
    assert_eq!(
        refused(primitives::ldmatrix(), one + 1),
        "ldmatrix: element 0 is 1065353217, expected 1065353216 bit for bit"
    );
    let exact = (-2020.0f32 / 23.5).exp();
    primitives::exp().compare(&[exact.to_bits() + 1]).unwrap();
    let told = refused(primitives::exp(), exact.to_bits() + 40);
    assert!(
        told.starts_with("exp: element 0 is 0.000000000000000000000000000000000000046"),
        "{told}"
    );
    assert!(told.contains(" within 2^-22 of themselves, "), "{told}");
    assert!(
        refused(primitives::mma(), f32::NAN.to_bits())
            .starts_with("mma: element 0 is NaN, expected ")
    );
    assert_eq!(
        same("w", &[0.0, -0.0], &[0.0, 0.0])
            .unwrap_err()
            .to_string(),
        "w: element 1 is -0.0, expected 0.0"
    );
}

#[test]
fn copies_and_graphs_pass_in_any_order_of_streams() {
    if !is_there() {
        return;
    }
    for order in Order::ALL {
        let (emulated, device) = emulated(order);
        let said = copies::rates(&device, 1 << 18).unwrap();
        assert!(
            said.starts_with("1 MiB to the GPU at ") && said.ends_with(" GB/s, unchanged"),
            "{said}"
        );
        let said = graph::replays(&device, 16).unwrap();
        assert!(
            said.starts_with("3 steps, two of them graph launches, "),
            "{said}"
        );
        drop(device);
        assert!(emulated.is_empty());
    }
}

// Control of the test above: it detects a graph that does not wait for a staged state.
#[test]
fn a_graph_that_overwrites_a_staged_state_is_detected() {
    if !is_there() {
        return;
    }
    let told = Order::ALL.into_iter().filter_map(|order| {
        let (emulated, device) = emulated(order);
        emulated.ignore(Ignored::GraphWait);
        graph::replays(&device, 16).err()
    });
    let told: Vec<String> = told.map(|fault| fault.to_string()).collect();
    assert!(!told.is_empty());
    for line in told {
        assert!(line.contains(" as staged after step 2 "), "{line}");
    }
}

#[test]
fn probes_are_compiled_without_a_gpu() {
    if Library::Nvrtc.found().is_none() {
        return spd_testing::skip("NVRTC");
    }
    let cache = std::env::temp_dir().join(format!("spd-probes-{}", std::process::id()));
    for (arch, new) in [("sm_80", true), ("sm_90", true), ("sm_90", false)] {
        let (device, compiling) = Device::compiling(arch, cache.clone());
        compile(&device).unwrap();
        let (kernels, compiled) = compiling.counts();
        assert!(kernels > 5, "{kernels}");
        assert_eq!(compiled, if new { kernels } else { 0 });
    }
    std::fs::remove_dir_all(&cache).unwrap();
}

#[test]
fn two_ranks_claim_separate_hosts_before_nccl_2_30() {
    let first = |version: &str| nccl::way(version, 1).remove(0);
    for old in ["2.28.9", "2.9.8", ""] {
        assert_eq!(first(old), ("NCCL_HOSTID", "rank1".to_owned()));
    }
    for new in ["2.30.3", "3.0.0"] {
        assert_eq!(first(new), ("NCCL_MULTI_RANK_GPU_ENABLE", "1".to_owned()));
    }
    let ranks = PROBES.iter().filter(|probe| probe.ranks > 1);
    assert_eq!(ranks.count(), 1);
}
