//! Matrix products by cublasLt, planned once for each kind.
//!
//! cublasLt lists several algorithms, of which [`autotune`](super::autotune) chooses by
//! measurement. An algorithm is 64 opaque bytes, valid for one version of the library.
#![expect(unsafe_code, reason = "cublasLt is a C library")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::CUstream;

use super::driver::{Factors, pointer};
use super::placed::PlacedProduct;
use super::product::{Algorithm, Key, Layout};
use super::{Fault, Result};
use crate::value::DType;

/// Bytes of scratch for an algorithm; NVIDIA's advice for Hopper.
pub const WORKSPACE: usize = 32 << 20;

/// Maximum of algorithms that cublasLt lists.
const CANDIDATES: usize = 8;

/// The library, and the plans made so far.
#[derive(Debug)]
pub(super) struct CublasLt {
    handle: sys::cublasLtHandle_t,
    plans: BTreeMap<Key, Plan>,
}

/// Plan of one kind of product. Its descriptions live as long as the library, because plans are
/// few.
#[derive(Debug)]
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    /// Algorithms in cublasLt's order of preference.
    algorithms: Vec<Algorithm>,
}

fn failed(what: &str, error: result::CublasError) -> Fault {
    Fault::new(format!("cublasLt cannot {what}: {error:?}"))
}

impl CublasLt {
    /// Opens the library for the current context.
    pub(super) fn new() -> Result<Self> {
        let handle = result::create_handle().map_err(|error| failed("start", error))?;
        Ok(Self {
            handle,
            plans: BTreeMap::new(),
        })
    }

    /// Algorithms of cublasLt for a kind of product, in cublasLt's order; empty if it refuses.
    pub(super) fn algorithms(&mut self, key: &Key) -> Result<Vec<Algorithm>> {
        Ok(self.plan(key)?.algorithms.clone())
    }

    /// Whether an algorithm computes a kind of product: cublasLt lists it, or says so of it, with
    /// the scratch that there is.
    pub(super) fn takes(&mut self, key: &Key, algorithm: Algorithm) -> Result<bool> {
        let handle = self.handle;
        let plan = self.plan(key)?;
        // SAFETY: the library is open.
        Ok(plan.algorithms.contains(&algorithm) || unsafe { plan.takes(handle, algorithm) })
    }

    fn plan(&mut self, key: &Key) -> Result<&mut Plan> {
        let handle = self.handle;
        match self.plans.entry(*key) {
            Entry::Occupied(plan) => Ok(plan.into_mut()),
            Entry::Vacant(place) => {
                // SAFETY: `handle` lives as long as `self`.
                let plan = unsafe { plan(handle, key) };
                let Layout { rows, columns, .. } = key.c;
                let what = format!("plan {columns}x{rows}");
                let plan = place.insert(plan.map_err(|error| failed(&what, error))?);
                if key.has_long_sums() {
                    // SAFETY: as above.
                    unsafe { plan.split(handle) };
                }
                Ok(plan)
            }
        }
    }

    /// Enqueues a product on a stream.
    pub(super) fn multiply(
        &mut self,
        placed: &PlacedProduct,
        factors: Factors,
        workspace: u64,
        stream: CUstream,
    ) -> Result<()> {
        let product = &placed.product;
        let [a, b, out] = [factors.a, factors.b, factors.out].map(|of| of.address);
        let bias = factors.bias.map(|bias| bias.address);
        let all = a | b | out | bias.unwrap_or(0);
        let alignment = 1 << all.trailing_zeros().min(4);
        let handle = self.handle;
        let plan = self.plan(&product.key(alignment, placed.tf32))?;
        let best = || plan.algorithms.first().copied();
        let Some(Algorithm(data)) = placed.algorithm.or_else(best) else {
            return Err(Fault::new(format!(
                "cublasLt has no algorithm for {}x{}x{}",
                product.m, product.n, product.k
            )));
        };
        let algorithm = sys::cublasLtMatmulAlgo_t { data };
        let beta = if product.add { 1f32 } else { 0.0 };
        // SAFETY: addresses are operands of a program in their places; descriptions live as long
        // as `self`, and those with a pointer are read during the call.
        unsafe {
            if let Some(bias) = &bias {
                set(
                    result::set_matmul_desc_attribute,
                    plan.description,
                    sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                    bias,
                )
                .map_err(|error| failed("take a bias", error))?;
            }
            // cublasLt's first factor is our second one.
            result::matmul(
                handle,
                plan.description,
                (&raw const product.alpha).cast(),
                (&raw const beta).cast(),
                pointer(b),
                plan.layouts[0],
                pointer(a),
                plan.layouts[1],
                pointer(out),
                plan.layouts[2],
                pointer(out),
                plan.layouts[2],
                &raw const algorithm,
                pointer(workspace),
                WORKSPACE,
                stream.cast(),
            )
            .map_err(|error| failed("multiply", error))
        }
    }
}

impl Plan {
    /// Whether cublasLt says that an algorithm does, with the scratch that there is.
    ///
    /// # Safety
    ///
    /// `handle` must be open.
    unsafe fn takes(&self, handle: sys::cublasLtHandle_t, Algorithm(data): Algorithm) -> bool {
        let asked = sys::cublasLtMatmulAlgo_t { data };
        let mut found = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        let (description, [a, b, c]) = (self.description, self.layouts);
        let (asked, to) = (&raw const asked, found.as_mut_ptr());
        // SAFETY: the descriptions of a plan live as long as the library; zeros are a result.
        let (status, found) = unsafe {
            let status = sys::cublasLtMatmulAlgoCheck(handle, description, a, b, c, c, asked, to);
            (status, found.assume_init())
        };
        let holds = status.result().is_ok() && found.state.result().is_ok();
        holds && found.workspaceSize <= WORKSPACE
    }

    /// Adds its first choice with sums cut into parts: a device has more multiprocessors than a
    /// small result has tiles.
    ///
    /// # Safety
    ///
    /// `handle` must be open.
    unsafe fn split(&mut self, handle: sys::cublasLtHandle_t) {
        use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
        let Some(&Algorithm(first)) = self.algorithms.first() else {
            return;
        };
        for parts in [2u32, 4, 6] {
            let mut algorithm = sys::cublasLtMatmulAlgo_t { data: first };
            let mut set = |attribute, value: &u32| {
                let (to, value) = (&raw mut algorithm, std::ptr::from_ref(value).cast());
                // SAFETY: the attributes below are 32 bits.
                unsafe { sys::cublasLtMatmulAlgoConfigSetAttribute(to, attribute, value, 4) }
            };
            let are_set = [
                set(Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts),
                set(Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &SCHEME),
            ];
            let are_set = are_set.iter().all(|status| status.result().is_ok());
            let split = Algorithm(algorithm.data);
            // SAFETY: the caller's promise.
            if are_set && !self.algorithms.contains(&split) && unsafe { self.takes(handle, split) }
            {
                self.algorithms.push(split);
            }
        }
    }
}

/// Split sums are added in f32 in scratch, without rounding into the result in between.
const SCHEME: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;

/// # Safety
///
/// `handle` must be open.
unsafe fn plan(handle: sys::cublasLtHandle_t, key: &Key) -> Result<Plan, result::CublasError> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
    let float = sys::cudaDataType::CUDA_R_32F;
    // Sums are f32 for all types of factors.
    let compute = if key.tf32 {
        sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
    } else {
        sys::cublasComputeType_t::CUBLAS_COMPUTE_32F
    };
    let description = result::create_matmul_desc(compute, float)?;
    let [factors, result] = key.types;
    let layouts = [(key.a.0, factors), (key.b.0, factors), (key.c, result)];
    let mut made = [std::ptr::null_mut(); 3];
    // SAFETY: all of it was just created.
    unsafe {
        let describe = result::set_matmul_desc_attribute;
        for (attribute, transposed) in [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, key.a.1),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, key.b.1),
        ] {
            set(describe, description, attribute, &i32::from(transposed))?;
        }
        if key.bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            let attribute = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE;
            set(describe, description, attribute, &epilogue)?;
        }
        for (made, layout) in made.iter_mut().zip(layouts) {
            *made = matrix_layout(layout, key.batch)?;
        }
        let preference = result::create_matmul_pref()?;
        let prefer = result::set_matmul_pref_attribute;
        let most = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        set(prefer, preference, most, &WORKSPACE)?;
        let schemes = Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
        set(prefer, preference, schemes, &SCHEME)?;
        let alignment = u32::try_from(key.alignment).expect("at most 16");
        for attribute in [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            set(prefer, preference, attribute, &alignment)?;
        }
        let [a, b, c] = made;
        let mut found = [MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed(); CANDIDATES];
        let mut count = 0;
        let status = sys::cublasLtMatmulAlgoGetHeuristic(
            handle,
            description,
            a,
            b,
            c,
            c,
            preference,
            i32::try_from(CANDIDATES).expect("a few"),
            found.as_mut_ptr().cast(),
            &raw mut count,
        );
        result::destroy_matmul_pref(preference)?;
        let count = match status.result() {
            Ok(()) => usize::try_from(count).unwrap_or(0),
            Err(error) if is_refusal(error) => 0,
            Err(error) => return Err(error),
        };
        let found = found
            .iter()
            .take(count)
            .map(|found| found.assume_init_ref());
        let works = found.filter(|found| found.state.result().is_ok());
        Ok(Plan {
            description,
            layouts: made,
            algorithms: works.map(|found| Algorithm(found.algo.data)).collect(),
        })
    }
}

/// Whether the error means an unsupported product rather than a failure.
fn is_refusal(error: result::CublasError) -> bool {
    use sys::cublasStatus_t as Status;
    matches!(
        error.0,
        Status::CUBLAS_STATUS_NOT_SUPPORTED | Status::CUBLAS_STATUS_INVALID_VALUE
    )
}

fn data_type(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::F32 => sys::cudaDataType::CUDA_R_32F,
        DType::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        DType::U32 => unreachable!("numbers of a product"),
    }
}

/// # Safety
///
/// Only cublasLt's conditions: the layout is created here.
unsafe fn matrix_layout(
    (layout, dtype): (Layout, DType),
    batch: usize,
) -> Result<sys::cublasLtMatrixLayout_t, result::CublasError> {
    use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
    let (rows, columns) = (layout.rows as u64, layout.columns as u64);
    let pitch = i64::try_from(layout.pitch).expect("a row of a matrix");
    let made = result::create_matrix_layout(data_type(dtype), rows, columns, pitch)?;
    if batch > 1 {
        let count = i32::try_from(batch).expect("a batch of products");
        let step = i64::try_from(layout.step).expect("a matrix");
        let arrange = result::set_matrix_layout_attribute;
        let [counts, steps] = [
            Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
            Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
        ];
        // SAFETY: `made` was created above; the values have the types of the attributes.
        unsafe {
            set(arrange, made, counts, &count)?;
            set(arrange, made, steps, &step)?;
        }
    }
    Ok(made)
}

/// Sets an attribute of a description, by the library's function for that kind of description.
///
/// # Safety
///
/// `of` must be live, and `T` must be the type of the attribute.
unsafe fn set<O, A, T>(
    by: unsafe fn(O, A, *const c_void, usize) -> Result<(), result::CublasError>,
    of: O,
    attribute: A,
    value: &T,
) -> Result<(), result::CublasError> {
    let value = std::ptr::from_ref(value).cast();
    // SAFETY: the caller's promise.
    unsafe { by(of, attribute, value, size_of::<T>()) }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: created by this library and not used elsewhere.
        unsafe {
            for plan in self.plans.values() {
                for layout in plan.layouts {
                    let _ = result::destroy_matrix_layout(layout);
                }
                let _ = result::destroy_matmul_desc(plan.description);
            }
            let _ = result::destroy_handle(self.handle);
        }
    }
}
