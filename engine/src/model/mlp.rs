//! The dense MLP: `down(silu(gate(x)) * up(x))`. Also the shared experts of a MoE layer, which are one wide MLP.

use super::observer::{Observer, Op};
use super::parameters::linear;
use super::plan::Form;
use super::weights::{Loader, Side, WeightsError};
use ernie_kernels::{Acts, Arrange, Matrix, Out, Pool, gemm};

#[derive(Debug)]
pub struct Mlp {
    pub(crate) gate_up: Matrix,
    pub(crate) down: Matrix,
}

impl Mlp {
    /// `norm`: weights of the norm in front of the block.
    pub(crate) fn load(
        loader: &mut Loader<'_>,
        (gate_up, down): (Form, Form),
        norm: &[f32],
        prefix: &str,
    ) -> Result<Self, WeightsError> {
        let names = (linear(prefix, "gate"), linear(prefix, "up"));
        Ok(Self {
            gate_up: loader.matrix(gate_up, Arrange::GateUp, Side::Reads(norm), &[&names.0, &names.1])?,
            down: loader.matrix(down, Arrange::Concat, Side::Writes, &[&linear(prefix, "down")])?,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.gate_up.bytes() + self.down.bytes()
    }

    /// Adds the MLP of the converted rows in `acts` to `x`; `inner` is overwritten.
    pub(crate) fn forward(
        &self,
        pool: &Pool,
        acts: &Acts,
        inner: &mut Acts,
        x: &mut [f32],
        observer: &mut impl Observer,
    ) {
        gemm(pool, acts, &self.gate_up, Out::SiluMul { acts: inner, kind: self.down.act_kind() });
        observer.after(Op::GateUp);
        gemm(pool, inner, &self.down, Out::Add(x));
        observer.after(Op::Down);
    }
}
