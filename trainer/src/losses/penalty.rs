//! The sums of penalised importances that losses of sparsity are made of.

use spd_engine::{Builder, Result, Value, ops};

use super::LossInputs;

/// The penalty sums of each site over the whole batch, each f32 `[c]`.
pub(super) fn sums(b: &mut Builder, from: &LossInputs<'_>) -> Result<Vec<Value>> {
    let sites = from.clean_pass.sites.iter();
    let sums: Vec<Value> = sites.map(|site| site.penalty_sums).collect();
    all_reduce_rows(b, &sums)
}

/// The sum over sites of what `op` makes of their `sums`, a scalar. The gradient flows to the
/// importance functions.
///
/// - `op`: for a number of rows of the whole batch
pub(super) fn value(
    b: &mut Builder,
    from: &LossInputs<'_>,
    sums: &[Value],
    op: impl Fn(usize) -> ops::ImportanceMinimality,
) -> Result<Value> {
    let sites = from.clean_pass.sites.iter().zip(sums);
    let terms = sites.map(|(site, &sums)| {
        let op = op(site.rows * b.blocks());
        Ok((1.0, b.importance_minimality(op, sums)?))
    });
    let terms = terms.collect::<Result<Vec<_>>>()?;
    b.weighted_sum(&terms)
}

/// Sums of rows, f32 `[c]` each, over all blocks, by one all-reduce.
fn all_reduce_rows(b: &mut Builder, rows: &[Value]) -> Result<Vec<Value>> {
    if b.blocks() == 1 {
        return Ok(rows.to_vec());
    }
    let joined = b.concatenate(rows)?;
    let sum = b.all_reduce(joined)?;
    let mut end = 0;
    let slice = |&row: &Value| {
        let start = end;
        end += b.ty(row).len();
        b.slice(sum, start..end)
    };
    rows.iter().map(slice).collect()
}
