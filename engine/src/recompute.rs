//! Recomputation: the gradients make again, from a few values, whatever a part of the forward pass
//! made, so that it need not be kept from the one to the other.
//!
//! A region is a stretch of the forward pass, such as a block of a masked pass. Values that leave
//! their region are kept: other ops of the forward pass read them, or they are outputs. The others
//! are dropped when the forward pass has used them, and a gradient that reads one reads a copy:
//!
//! ```text
//! region      x -> h1 -> h2 -> y         kept: x, y
//! gradients   x -> h1' -> h2'            before the first gradient that reads one of them
//! ```
//!
//! Copies are the same ops on the same values, and draws are functions of counters, so in f32 the
//! gradients have the same bits. A device that stores bf16 stores a copy as it stores the original;
//! chains of element-wise ops may round less where they are fused into one kernel.

use std::collections::BTreeMap;
use std::mem;

use crate::builder::BACKWARD;
use crate::op::{Builder, Home, Node};
use crate::value::Value;

impl Builder {
    /// Begins a region: ops belong to it until another begins or the region
    /// [ends](Self::end_region). An op that exists already stays where it is.
    pub fn begin_region(&mut self) {
        self.region = Some(self.region_count);
        self.region_count += 1;
    }

    /// Ends the region.
    pub fn end_region(&mut self) {
        self.region = None;
    }

    /// Has gradients make the values inside regions again. It comes after the last gradient.
    pub fn recompute(&mut self) {
        let of_program = Forward {
            inside: self.inside_regions(),
            homes: self.homes.clone(),
            nodes: mem::take(&mut self.nodes),
        };
        self.regions.clear();
        let mut copies = BTreeMap::new();
        for node in &of_program.nodes {
            let mut node = node.clone();
            if node.eager {
                self.read_copies(&mut node, &of_program, &mut copies);
            }
            self.append(node);
        }
        self.copies
            .extend(copies.into_iter().map(|(of, copy)| (copy, of)));
    }

    /// For each value, whether it lies inside a region and no forward op outside of it reads it.
    fn inside_regions(&self) -> Vec<bool> {
        let region = |value: Value| self.regions.get(&self.maker(value)?);
        let values = (0..).take(self.types.len()).map(Value);
        let mut inside: Vec<bool> = values.map(|value| region(value).is_some()).collect();
        for (index, node) in self
            .nodes
            .iter()
            .enumerate()
            .filter(|(_, node)| !node.eager)
        {
            for &value in node.inputs.iter().chain(node.into.iter().flatten()) {
                if region(value) != self.regions.get(&index) {
                    inside[value.index()] = false;
                }
            }
        }
        for &(_, value) in &self.outputs {
            inside[value.index()] = false;
        }
        inside
    }

    /// Has a node read copies of what lies inside regions.
    fn read_copies(
        &mut self,
        node: &mut Node,
        forward: &Forward,
        copies: &mut BTreeMap<Value, Value>,
    ) {
        for value in node.inputs.iter_mut().chain(node.into.iter_mut().flatten()) {
            if forward.inside[value.index()] {
                if !copies.contains_key(value) {
                    self.copy(*value, forward, copies);
                }
                *value = copies[value];
            }
        }
    }

    /// Makes the op of a value again, behind those that it reads.
    fn copy(&mut self, value: Value, forward: &Forward, copies: &mut BTreeMap<Value, Value>) {
        let Home::Node(index) = forward.homes[value.index()] else {
            unreachable!("only results of ops lie inside regions");
        };
        let mut node = forward.nodes[index].clone();
        self.read_copies(&mut node, forward, copies);
        for output in &mut node.outputs {
            let copy = self.value(self.ty(*output).clone(), Home::Node(self.nodes.len()));
            copies.insert(mem::replace(output, copy), copy);
        }
        node.part = BACKWARD;
        self.append(node);
    }
}

/// The program before copies are made.
struct Forward {
    inside: Vec<bool>,
    homes: Vec<Home>,
    nodes: Vec<Node>,
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cpu::{Alone, Pool};
    use crate::ops::GeluKind;
    use crate::random_programs::Recipe;
    use crate::{Plan, Store, Type};

    const LAYERS: usize = 6;

    /// The gradients of a chain of layers, a region each, which it may recompute.
    fn chain(recomputes: bool) -> Builder {
        let mut b = Builder::new();
        let weights: Vec<Value> = (0..LAYERS)
            .map(|layer| {
                b.input(&format!("w{layer}"), &Type::f32(&[16, 16]))
                    .unwrap()
            })
            .collect();
        let mut x = b.input("x", &Type::f32(&[64, 16])).unwrap();
        for &w in &weights {
            b.begin_region();
            let hidden = b.matmul(x, w).unwrap();
            let hidden = b.gelu(hidden, GeluKind::Exact).unwrap();
            let hidden = b.matmul(hidden, w).unwrap();
            let hidden = b.gelu(hidden, GeluKind::Exact).unwrap();
            x = b.add(x, hidden).unwrap();
        }
        b.end_region();
        let loss = b.sum_squares(x).unwrap();
        let gradients = b.gradients(loss, &weights).unwrap();
        for (layer, gradient) in gradients.into_iter().enumerate() {
            b.output(format!("{layer}"), gradient.unwrap());
        }
        if recomputes {
            b.recompute();
        }
        b
    }

    fn run(b: &Builder) -> Vec<(String, Vec<u32>)> {
        let mut executor = Alone::new(b, Arc::new(Pool::single()));
        for (seed, name) in (0..).zip(b.inputs.keys()) {
            let input = executor.input(name);
            let len = input.len();
            input.copy_from_slice(&crate::ops::oracle::random(&[len], seed).values);
        }
        let mut store = Store::new();
        executor.run(&mut store);
        let bits = |name: &str| {
            let values = executor.output(name, &store).iter();
            values.map(|value| value.to_bits()).collect()
        };
        let names = b.outputs.iter().map(|(name, _)| name.clone());
        names.map(|name| (name.clone(), bits(&name))).collect()
    }

    // Without: three intermediates a layer and their sum. With: the sums, and the intermediates of
    // one layer.
    #[test]
    fn a_chain_holds_the_intermediates_of_one_layer_and_has_the_same_bits() {
        let [kept, recomputed] = [false, true].map(chain);
        assert_eq!(run(&kept), run(&recomputed));
        let bytes = |b: &Builder| Plan::new(b).arena_bytes() / (4 * 64 * 16);
        let (kept, recomputed) = (bytes(&kept), bytes(&recomputed));
        assert!(kept >= 4 * LAYERS, "{kept}");
        assert!(recomputed <= LAYERS + 8, "{recomputed}");
    }

    #[test]
    fn only_gradients_read_copies_and_only_of_what_stays_inside() {
        let count = |b: &Builder| {
            let name = |name: &str| b.nodes.iter().filter(|node| node.op.name() == name).count();
            ["matmul", "gelu", "add", "gelu_grad"].map(name)
        };
        let [matmul, gelu, add, slope] = count(&chain(false));
        // A copy of the second product needs those of the first and of its GELU; the second GELU
        // leads to the sum alone, which is kept.
        let again = [matmul + 2 * LAYERS, gelu + LAYERS, add, slope];
        assert_eq!(count(&chain(true)), again);
        let mut without = Builder::new();
        let x = without.input("x", &Type::f32(&[4])).unwrap();
        let loss = without.sum_squares(x).unwrap();
        without.gradients(loss, &[x]).unwrap();
        let before = without.nodes.len();
        without.recompute();
        assert_eq!(without.nodes.len(), before);
    }

    // Regions of a random number of ops.
    #[test]
    fn random_programs_have_the_same_bits() {
        for seed in 0..40 {
            let recipe = Recipe::new(seed);
            let program = |recomputes: bool| {
                let mut b = Builder::new();
                let leaves = (0..).zip(&recipe.leaves);
                let leaves: Vec<Value> = leaves
                    .map(|(index, leaf)| {
                        b.input(&index.to_string(), &Type::f32(&leaf.dims)).unwrap()
                    })
                    .collect();
                let loss = recipe.ours(&mut b, &leaves).unwrap();
                for node in 0..b.nodes.len() {
                    let region = (node as u64 + seed) / (2 + seed % 5);
                    b.regions.insert(node, region.try_into().unwrap());
                }
                b.output("loss", loss);
                let gradients = b.gradients(loss, &leaves).unwrap();
                for (index, gradient) in gradients.into_iter().enumerate() {
                    b.output(format!("gradient {index}"), gradient.unwrap());
                }
                if recomputes {
                    b.recompute();
                }
                b
            };
            assert_eq!(run(&program(false)), run(&program(true)), "{seed}");
        }
    }
}
