//! Messages of protobuf, written as in a `.proto` file.

/// Each `NAME { FIELD: TYPE = [WIRE], .. }` is a message. `WIRE` is the type and the tag of the
/// field in prost's words.
macro_rules! messages {
    ($($(#[$about:meta])* $name:ident {
        $($(#[$of:meta])* $field:ident: $type:ty = [$($wire:tt)*],)*
    })*) => {$(
        $(#[$about])*
        #[derive(Clone, PartialEq, prost::Message)]
        pub(super) struct $name {
            $($(#[$of])* #[prost($($wire)*)] pub(super) $field: $type,)*
        }
    )*};
}

pub(crate) use messages;
