//! The peak rate of multiplications and additions of a GPU, as its maker says. Utilisation is the
//! rate of a run over it. The peak of other GPUs and of CPUs is not known, and they show none.

use crate::run_file::Precision;

/// Words of the name of a GPU, and its dense operations a second in bf16, TF32 and f32, in 1e12.
/// The first whose words are in a name is the one.
const KNOWN: &[(&[&str], [f64; 3])] = &[
    (&["H100", "PCIe"], [756.0, 378.0, 51.0]),
    (&["H100", "NVL"], [835.5, 417.5, 60.0]),
    (&["H200", "NVL"], [835.5, 417.5, 60.0]),
    (&["H100"], [989.4, 494.7, 66.9]),
    (&["H200"], [989.4, 494.7, 66.9]),
    (&["A100"], [312.0, 156.0, 19.5]),
];

/// The most operations a second of a GPU of this name.
pub(crate) fn of(name: &str, precision: Precision) -> Option<f64> {
    let has = |(words, _): &&(&[&str], _)| words.iter().all(|word| name.contains(word));
    let (_, [bf16, tf32, f32]) = KNOWN.iter().find(has)?;
    let peak = match precision {
        Precision::Bf16 => bf16,
        Precision::Tf32 => tf32,
        Precision::F32 => f32,
    };
    Some(1e12 * peak)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_of_a_gpu_is_that_of_its_name_and_precision() {
        let of = |name| of(name, Precision::Bf16);
        assert_eq!(of("NVIDIA H100 80GB HBM3, driver 570"), Some(989.4e12));
        assert_eq!(of("NVIDIA H100 PCIe"), Some(756e12));
        assert_eq!(of("emulated"), None);
        assert_eq!(
            super::of("NVIDIA A100-SXM4-80GB", Precision::F32),
            Some(19.5e12)
        );
    }
}
