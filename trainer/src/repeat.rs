//! Rows, so many times.

use spd_engine::{Builder, Result, Value};

/// Each number of f32 `[n]`, or each row of f32 `[.., c]`, so many times in turn. The gradient is
/// the sum over all times.
///
/// # Errors
///
/// When it is not f32.
pub(crate) fn repeat_rows(b: &mut Builder, x: Value, times: usize) -> Result<Value> {
    if times == 1 {
        return Ok(x);
    }
    let (tiled, dims) = tiled(b, x, times)?;
    let repeated = b.second_first(tiled)?;
    b.reshape(repeated, &dims)
}

/// All numbers of f32 `[n]`, or all rows of f32 `[.., c]`, so many times over. The gradient is the
/// sum over all times.
///
/// # Errors
///
/// When it is not f32.
pub(crate) fn tile_rows(b: &mut Builder, x: Value, times: usize) -> Result<Value> {
    if times == 1 {
        return Ok(x);
    }
    let (tiled, dims) = tiled(b, x, times)?;
    b.reshape(tiled, &dims)
}

/// Rows so many times over, f32 `[times, rows, c]`; and the shape of as many rows of that of `x`.
fn tiled(b: &mut Builder, x: Value, times: usize) -> Result<(Value, Vec<usize>)> {
    let ty = b.ty(x).clone();
    let (rows, c, dims) = match ty.dims[..] {
        [rows] => (rows, 1, vec![times * rows]),
        _ => (
            ty.rows(),
            ty.columns(),
            vec![times * ty.rows(), ty.columns()],
        ),
    };
    let x = b.reshape(x, &[rows, c])?;
    let nothing = b.constant(0.0, &[times, rows, c])?;
    Ok((b.add_positions(nothing, x)?, dims))
}
