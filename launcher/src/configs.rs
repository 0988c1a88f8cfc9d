//! `spd-launch configs [NAME]`: the run files that are part of this program, listed, or one printed to be edited.

use spd_configs::Shipped;

use crate::exit::Exit;
use crate::screen;
use crate::table::Table;

/// Lists them with what each is, or prints the one of this name.
pub(crate) fn configs(name: Option<&str>) -> Exit {
    match name.and_then(Shipped::named) {
        Some(shipped) => screen::result(shipped.text),
        None => {
            let mut table = Table::default();
            for shipped in Shipped::ALL {
                table.row([shipped.name.to_owned(), shipped.about()]);
            }
            screen::result(&table.text());
            screen::note("`spd-launch configs NAME > mine.toml` prints one, to be edited");
        }
    }
    Exit::Done
}
