//! `lr_schedule`, or `lr` with its words of older files.

use super::made::Made;
use spd_configs::{
    reader::Table,
    values::{OneOf, Text},
    yaml::Value,
};

/// Puts a learning rate of the reference into `out`. Unlike ours, its schedules end where they
/// start unless they say otherwise.
pub(crate) fn read(table: &mut Table<'_>, out: &mut Made) {
    let place = table.place("lr_schedule");
    if !table.has("lr") {
        table.table("lr_schedule", |of| {
            let mut made = Made::default();
            made.need(of, ("start_val", "a number above 0"), "start");
            made.carry(of, "fn_type", "shape");
            made.carry(of, "warmup_pct", "warmup");
            let one = (place, Value::Number("1".to_owned()));
            made.carry_or(of, "final_val_frac", "final_fraction", one);
            out.table("lr", place, made);
            Some(())
        });
        return;
    }
    // In older files a cosine fell to 0, and anything else stayed.
    let mut made = Made::default();
    let place = table.place("lr");
    made.carry(table, "lr", "start");
    made.carry(table, "lr_warmup_pct", "warmup");
    let shapes = OneOf(&[("constant", "1"), ("cosine", "0"), ("linear", "1")]);
    let end = table.or("lr_schedule", shapes, "1");
    let shape = table.or("lr_schedule", Text::ANY, "constant".to_owned());
    if let (Some(end), Some(shape)) = (end, shape) {
        made.text("shape", place, &shape);
        made.put("final_fraction", place, Value::Number(end.to_owned()));
    }
    out.table("lr", place, made);
}
