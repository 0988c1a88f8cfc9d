//! A program on either processor: its plan, inputs and numbers of the step, which the host gives
//! before a replay, and the clock of its ops.

use std::ops::Range;
use std::time::Duration;

use crate::large_pages::Part;
use crate::op::Builder;
use crate::own_memory::OwnMemory;
use crate::plan::{Place, Plan};
use crate::profile::OpProfile;
use crate::step_parameters::StepParameters;
use crate::value::{DType, StepScalar};

/// Inputs and numbers of a planned program. The host gives them before a replay, and the program
/// keeps them until it is given others, whatever runs in between. The clock of its ops runs if the
/// host asks for it.
#[derive(Debug)]
pub struct Given {
    /// Numbers of the next replay.
    pub parameters: StepParameters,
    /// Memory of the program beside arena and store.
    pub own: OwnMemory,
    /// Names of the step scalars.
    scalars: Vec<String>,
    inputs: Vec<Input>,
    /// Words of the inputs that were filled since a device last read them.
    filled: Vec<Range<usize>>,
    /// Words of all inputs, once there is [room](Self::make_room).
    memory: Option<Part<u32>>,
    pub(crate) plan: Plan,
    /// Names of the outputs.
    outputs: Vec<String>,
    /// For each op of the plan its part of the program, and its work; the time there is zero.
    pub(crate) ops: Vec<(&'static str, OpProfile)>,
    /// Time of each op, while the clock runs.
    pub(crate) times: Option<Vec<Duration>>,
}

/// An input, and its words among those of all. Both types of inputs have elements of four bytes.
#[derive(Debug)]
struct Input {
    name: String,
    dtype: DType,
    words: Range<usize>,
}

impl Given {
    /// Zeros.
    pub(crate) fn new(builder: &Builder, plan: Plan) -> Self {
        let inputs = builder.inputs.iter().map(|(name, &value)| {
            let Some(Place::Input(offset)) = plan.places[value.index()] else {
                unreachable!("inputs have places of their own");
            };
            let ty = builder.ty(value);
            Input {
                name: name.clone(),
                dtype: ty.dtype,
                words: offset / 4..offset / 4 + ty.len(),
            }
        });
        let ops = plan.nodes.iter().map(|planned| {
            let node = &builder.nodes[planned.node];
            let copied = planned.copies.iter().map(|&(_, output)| output);
            (node.part, OpProfile::of(builder, node, copied))
        });
        Self {
            parameters: StepParameters {
                scalars: vec![0.0; builder.scalars.len()],
                ..StepParameters::default()
            },
            own: OwnMemory {
                inputs: plan.input_bytes(),
                ..OwnMemory::default()
            },
            scalars: builder.scalars.clone(),
            inputs: inputs.collect(),
            filled: Vec::with_capacity(builder.inputs.len()),
            memory: None,
            ops: ops.collect(),
            times: None,
            outputs: builder
                .outputs
                .iter()
                .map(|(name, _)| name.clone())
                .collect(),
            plan,
        }
    }

    /// The words of all inputs, whose memory the first call makes: a program may be planned to no
    /// other end than to be looked at.
    pub(crate) fn make_room(&mut self) -> &mut [u32] {
        let words = self.plan.input_bytes() / 4;
        self.memory.get_or_insert_with(|| Part::alone(words))
    }

    /// Sets a step scalar by name; a name that the program does not use is ignored.
    pub fn set_scalar(&mut self, name: &str, value: f32) {
        if let Some(index) = self.scalars.iter().position(|known| known == name) {
            self.parameters.scalars[index] = value;
        }
    }

    /// Value of a step scalar at the next replay.
    pub fn scalar(&self, scalar: StepScalar) -> f32 {
        self.parameters.scalars[scalar.0 as usize]
    }

    /// Whether the program reads an input of this name.
    pub fn has_input(&self, name: &str) -> bool {
        self.inputs.iter().any(|input| input.name == name)
    }

    /// An f32 input.
    ///
    /// # Panics
    ///
    /// When the program has no f32 input of this name.
    pub fn input(&mut self, name: &str) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.typed(name, DType::F32))
    }

    /// An input of token ids.
    ///
    /// # Panics
    ///
    /// When the program has no such input of this name.
    pub fn input_u32(&mut self, name: &str) -> &mut [u32] {
        self.typed(name, DType::U32)
    }

    fn typed(&mut self, name: &str, dtype: DType) -> &mut [u32] {
        let found = self.inputs.iter().find(|input| input.name == name);
        let input = found.unwrap_or_else(|| panic!("the program has an input `{name}`"));
        assert_eq!(input.dtype, dtype, "the type of input `{name}`");
        let words = input.words.clone();
        if !self.filled.contains(&words) {
            self.filled.push(words.clone());
        }
        &mut self.make_room()[words]
    }

    /// An input of either type.
    #[cfg(any(test, feature = "compare-emulated"))]
    pub(crate) fn input_words(&mut self, name: &str) -> &mut [u32] {
        let input = self.inputs.iter().find(|input| input.name == name);
        self.typed(name, input.map_or(DType::F32, |input| input.dtype))
    }

    /// Names and words of the inputs.
    #[cfg(feature = "compare-emulated")]
    pub(crate) fn inputs(&self) -> impl Iterator<Item = (&str, &[u32])> {
        let inputs = self.inputs.iter();
        inputs.map(|input| (&*input.name, &self.words()[input.words.clone()]))
    }

    /// The words of all inputs, in their places.
    pub(crate) fn words(&self) -> &[u32] {
        self.memory.as_ref().expect("a replay makes room")
    }

    /// Words of the inputs that were filled since the last call, or of all for another device.
    pub(crate) fn take_filled(&mut self, device_is_new: bool) -> Vec<Range<usize>> {
        let all = self.inputs.iter().map(|input| input.words.clone());
        let filled = std::mem::take(&mut self.filled);
        if device_is_new { all.collect() } else { filled }
    }

    /// The words of an input of `len` elements as f32s.
    ///
    /// - `offset`: its [place](Place::Input)
    pub(crate) fn f32s(&self, offset: usize, len: usize) -> &[f32] {
        bytemuck::cast_slice(&self.words()[offset / 4..][..len])
    }

    /// The plan: order of ops and places of values.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Names of the outputs, in the order of the program.
    pub fn output_names(&self) -> impl Iterator<Item = &str> {
        self.outputs.iter().map(String::as_str)
    }

    /// The place of an output among these.
    ///
    /// # Panics
    ///
    /// When the program has no output of this name.
    pub(crate) fn output_index(&self, name: &str) -> usize {
        let found = self.output_names().position(|known| known == name);
        found.unwrap_or_else(|| panic!("the program has an output `{name}`"))
    }

    /// Starts (or restarts) the clock of every op. While it runs, a GPU runs op by op, with a wait
    /// after each.
    pub fn start_profile(&mut self) {
        self.times = Some(vec![Duration::ZERO; self.ops.len()]);
    }

    /// Stops the clock of the ops, and returns the time of each [part](crate::Builder::part) of the
    /// program since [`Self::start_profile`], in the order in which they first ran.
    pub fn part_times(&mut self) -> Vec<(&'static str, Duration)> {
        let mut parts: Vec<(&'static str, Duration)> = Vec::new();
        let times = self.times.take().unwrap_or_default();
        for (&(part, _), time) in self.ops.iter().zip(times) {
            match parts.iter_mut().find(|(known, _)| *known == part) {
                Some((_, sum)) => *sum += time,
                None => parts.push((part, time)),
            }
        }
        parts
    }

    /// Time and work of each op since [`Self::start_profile`].
    pub fn profile(&self) -> Vec<OpProfile> {
        let ops = self.ops.iter().zip(self.times.iter().flatten());
        ops.map(|((_, op), &time)| OpProfile { time, ..op.clone() })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::{ALIGN, Type};

    #[test]
    fn inputs_start_at_cache_lines_and_are_sent_once_they_are_filled() {
        let mut b = Builder::new();
        for name in ["x", "y"] {
            b.input(name, &Type::f32(&[3])).unwrap();
        }
        let mut given = Given::new(&b, Plan::new(&b));
        for name in ["y", "x", "y"] {
            assert_eq!(given.input(name).as_ptr().addr() % ALIGN, 0);
        }
        let (x, y) = (0..3, 16..19);
        assert_eq!(given.take_filled(false), [y.clone(), x.clone()]);
        assert!(given.take_filled(false).is_empty());
        assert_eq!(given.take_filled(true), [x, y]);
    }
}
