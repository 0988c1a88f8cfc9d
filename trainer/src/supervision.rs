//! A rank among others, and under its supervisor.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::heartbeat::Heartbeat;
use crate::world::World;

/// Channels between a running rank and its supervisor.
#[derive(Debug, Clone, Default)]
pub struct Supervision {
    /// The ranks of the run.
    pub world: World,
    /// Set to have the rank save and leave.
    pub stop: Arc<AtomicBool>,
    /// How far the rank is.
    pub heartbeat: Arc<Heartbeat>,
}
