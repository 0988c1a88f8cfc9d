//! A component as the page gets it, from whichever file.

use serde::{Deserialize, Serialize};

/// The details of a component: a line of JSON. A harvest has all of it; `components.json` of an
/// evaluation has no histograms, tokens and other components.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Component {
    pub(super) index: u64,
    pub(super) mean_importance: Option<f64>,
    pub(super) density: Option<f64>,
    active: Option<u64>,
    /// Counts of its importances, of equal bins from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    importance_histogram: Option<Vec<u64>>,
    /// Counts of its activations, of two bins an octave, the first of which begins at 2^-24.
    #[serde(skip_serializing_if = "Option::is_none")]
    activation_histogram: Option<Vec<u64>>,
    #[serde(default)]
    pub(super) contexts: Vec<Context>,
    /// Tokens that tell of it: those it is active on, and those the target expects there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    input: Vec<Told>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    next: Vec<Told>,
    /// Components that are active together with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    together: Vec<Other>,
    pub(super) removal: Option<Removal>,
}

/// A stretch of text, and the position in it that it is shown for. Files of earlier builds have
/// neither the logit there nor the place in the dataset.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Context {
    /// The part of a sample by its logits, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<[f64; 2]>,
    #[serde(flatten)]
    pub(super) text: Stretch,
    logit: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sample: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sample_position: Option<u64>,
    token: Option<u64>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Stretch {
    pub(super) tokens: Vec<String>,
    pub(super) importances: Vec<Option<f32>>,
    #[serde(default)]
    pub(super) position: usize,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Told {
    token: String,
    count: Option<f64>,
    pmi: Option<f64>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Other {
    site: String,
    index: u64,
    both: u64,
    part: Option<f64>,
    times: Option<f64>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Removal {
    /// Number of rows and positions of the mean. Files of earlier builds have none; they used one
    /// position.
    rows: Option<u64>,
    positions: Option<u64>,
    pub(super) kl: Option<f64>,
    /// Length of what the component adds to the output of its site. Files of earlier builds have
    /// none.
    pub(super) activation: Option<f64>,
    #[serde(default)]
    up: Vec<Change>,
    #[serde(default)]
    down: Vec<Change>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Change {
    token: String,
    change: Option<f64>,
}

impl Stretch {
    /// Importances in three decimals.
    pub(super) fn round(&mut self) {
        for importance in self.importances.iter_mut().flatten() {
            *importance = (*importance * 1000.0).round() / 1000.0;
        }
    }

    /// A few tokens around the peak: 8 before it, and 12 behind it.
    pub(super) fn beside(&self) -> Self {
        let peak = self.position.min(self.tokens.len());
        let first = peak.saturating_sub(8);
        let part = |len: usize| first.min(len)..len.min(peak + 13);
        Self {
            tokens: self.tokens[part(self.tokens.len())].to_vec(),
            importances: self.importances[part(self.importances.len())].to_vec(),
            position: peak - first,
        }
    }
}
