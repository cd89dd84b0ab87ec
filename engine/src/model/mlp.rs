//! The dense MLP: `down(silu(gate(x)) * up(x))`. Also the shared experts of a MoE layer, which are one wide MLP.

use super::observer::{Observer, Op};
use super::parameters::linear;
use super::plan::Form;
use super::weights::{Loader, Side, WeightsError};
use ernie_kernels::{Acts, Arrange, Matrix, Out, Pool, Rotation, gemm};
use std::sync::Arc;

#[derive(Debug)]
pub struct Mlp {
    pub(crate) gate_up: Matrix,
    pub(crate) down: Matrix,
    /// Basis that `down` reads in, where it is not that of the products.
    pub(crate) turn: Option<Arc<Rotation>>,
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
        let gate_up = loader.matrix(gate_up, Arrange::GateUp, Side::reads(norm), &[&names.0, &names.1])?;
        let turn = loader.turn_inside(gate_up.n() / 2);
        let side = Side::Writes(turn.as_deref());
        let down = loader.matrix(down, Arrange::Concat, side, &[&linear(prefix, "down")])?;
        Ok(Self { gate_up, down, turn })
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
        let (kind, turn) = (self.down.act_kind(), self.turn.as_deref());
        gemm(pool, acts, &self.gate_up, Out::SiluMul { acts: inner, kind, turn });
        observer.after(Op::GateUp);
        gemm(pool, inner, &self.down, Out::Add(x));
        observer.after(Op::Down);
    }
}
