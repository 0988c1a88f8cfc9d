//! `spd-launch configs [NAME]`: lists the shipped run files, or prints one.

use spd_configs::Shipped;

use crate::exit::Exit;
use crate::screen;
use crate::table::Table;

/// Lists the shipped run files with a summary, or prints the one named.
pub(crate) fn configs(name: Option<&str>) -> Exit {
    match name.and_then(Shipped::named) {
        Some(shipped) => screen::result(shipped.text),
        None => {
            let mut table = Table::default();
            for shipped in Shipped::ALL {
                table.row([shipped.name.to_owned(), shipped.about()]);
            }
            screen::result(&table.text());
            screen::note("`spd-launch configs NAME > mine.toml` prints one for editing");
        }
    }
    Exit::Done
}
