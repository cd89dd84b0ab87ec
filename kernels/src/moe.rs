//! The experts of one mixture layer: rows sorted by expert, one dispatch for all gate/up products, one for all down
//! products, then each token's experts added up in the order of its top-k.
//!
//! Routing itself is not here (`ops.rs`). Every expert's panels are split over the threads, so balance does not depend on
//! the routing; a row's result depends on that row and its experts only.

use std::fmt;
use std::ops::Range;

use crate::act::{Acts, for_rows};
use crate::epilogue::Sink;
use crate::gemm::{check, panels_per_job, run_panels};
use crate::isa::Isa;
use crate::matrix::{Arrange, Matrix};
use crate::memory::AlignedBuf;
use crate::rotation::Rotation;
use crate::table::KernelTable;
use crate::threads::{Pool, SharedMut};

/// Which experts each row goes to, and with what weight.
#[derive(Clone, Debug, Default)]
pub struct Routing {
    /// `[rows][top_k]` expert ids, in the order in which their outputs are added.
    pub experts: Vec<u32>,
    /// `[rows][top_k]`
    pub weights: Vec<f32>,
    /// Experts per row.
    pub top_k: usize,
}

/// Working memory of `moe`, sized once.
pub struct MoeScratch {
    /// Gathered, converted inputs in expert order.
    inputs: Acts,
    /// SiLU products in expert order.
    products: Acts,
    /// Expert outputs in expert order, `[rows * top_k][hidden]`.
    outputs: AlignedBuf<f32>,
    /// First sorted position of each expert, and the end.
    starts: Vec<usize>,
    /// Source row of each sorted position.
    rows: Vec<u32>,
    /// Sorted position of each (row, choice).
    positions: Vec<u32>,
    /// Experts that have rows.
    active: Vec<u32>,
    top_k: usize,
}

impl fmt::Debug for MoeScratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MoeScratch").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

impl MoeScratch {
    /// Room for `max_rows` rows of `hidden` values going to `top_k` of `experts` experts each.
    pub fn new(max_rows: usize, top_k: usize, hidden: usize, intermediate: usize, experts: usize) -> MoeScratch {
        let table = KernelTable::of(Isa::selected());
        MoeScratch::with_table(table, max_rows, top_k, hidden, intermediate, experts)
    }

    pub(crate) fn with_table(
        table: &'static KernelTable,
        max_rows: usize,
        top_k: usize,
        hidden: usize,
        intermediate: usize,
        experts: usize,
    ) -> MoeScratch {
        let positions = max_rows * top_k;
        MoeScratch {
            inputs: Acts::with_table(table, positions, hidden),
            products: Acts::with_table(table, positions, intermediate),
            outputs: AlignedBuf::zeroed(positions * hidden),
            starts: vec![0; experts + 1],
            rows: vec![0; positions],
            positions: vec![0; positions],
            active: Vec::with_capacity(experts),
            top_k,
        }
    }

    /// Memory reserved.
    pub fn bytes(&self) -> usize {
        self.inputs.bytes()
            + self.products.bytes()
            + size_of_val(&*self.outputs)
            + size_of_val(&*self.starts)
            + size_of_val(&*self.rows)
            + size_of_val(&*self.positions)
            + self.active.capacity() * size_of::<u32>()
    }

    /// Counting sort of (row, choice) pairs by expert; rows of one expert stay in ascending order.
    fn sort(&mut self, rows: usize, routing: &Routing) {
        let experts = self.starts.len() - 1;
        self.starts.fill(0);
        let choices = &routing.experts[..rows * routing.top_k];
        for &expert in choices {
            assert!((expert as usize) < experts, "expert {expert} does not exist: the layer has {experts}");
            self.starts[expert as usize + 1] += 1;
        }
        self.active.clear();
        for expert in 0..experts {
            if self.starts[expert + 1] > 0 {
                self.active.push(expert as u32);
            }
            self.starts[expert + 1] += self.starts[expert];
        }
        // `starts[e]` runs ahead while placing and ends as the start of e + 1; shift back afterwards.
        for (choice, &expert) in choices.iter().enumerate() {
            let position = &mut self.starts[expert as usize];
            self.rows[*position] = (choice / routing.top_k) as u32;
            self.positions[choice] = *position as u32;
            *position += 1;
        }
        self.starts.copy_within(0..experts, 1);
        self.starts[0] = 0;
    }

    fn range(starts: &[usize], expert: u32) -> Range<usize> {
        starts[expert as usize]..starts[expert as usize + 1]
    }
}

/// Adds the weighted outputs of each row's experts to `x`: `x[row] += sum over j of weight_j * expert_j(normed[row])`.
/// `turn`: the basis in which `down` reads the SiLU products, where it is not their own.
#[allow(clippy::too_many_arguments)] // the contract between kernels and model
pub fn moe(
    pool: &Pool,
    scratch: &mut MoeScratch,
    rows: usize,
    normed: &[f32],
    routing: &Routing,
    gate_up: &[Matrix],
    down: &[Matrix],
    turn: Option<&Rotation>,
    x: &mut [f32],
) {
    let experts = scratch.starts.len() - 1;
    assert!(gate_up.len() == experts && down.len() == experts, "one gate/up and one down matrix per expert");
    assert_eq!(routing.top_k, scratch.top_k, "routing and scratch agree on top_k");
    let choices = rows * routing.top_k;
    assert!(routing.experts.len() >= choices && routing.weights.len() >= choices, "routing covers every row");
    if rows == 0 || choices == 0 {
        return;
    }
    let (hidden, intermediate) = (gate_up[0].k(), down[0].k());
    assert_eq!(normed.len(), rows * hidden, "inputs hold rows x hidden values");
    assert_eq!(x.len(), rows * hidden, "the residual holds rows x hidden values");

    scratch.sort(rows, routing);
    let MoeScratch { inputs, products, outputs, starts, rows: sorted, positions, active, .. } = scratch;
    inputs.gather(pool, gate_up[0].act_kind(), hidden, normed, &sorted[..choices]);

    let writer = products.begin(down[0].act_kind(), choices, intermediate).turned(turn);
    for &expert in active.iter() {
        let w = &gate_up[expert as usize];
        check(inputs, w);
        assert!(
            w.arrange() == Arrange::GateUp && w.n() == 2 * intermediate,
            "experts have one shape, gate/up interleaved"
        );
    }
    run_experts(pool, inputs, gate_up, active, starts, &Sink::Silu { writer });
    writer.finish(pool, choices);

    for &expert in active.iter() {
        let w = &down[expert as usize];
        check(products, w);
        assert!(w.n() == hidden, "experts have one shape");
    }
    run_experts(pool, products, down, active, starts, &Sink::Store { out: SharedMut::new(outputs), stride: hidden });

    let add_scaled = products.table().rows.add_scaled;
    let x = SharedMut::new(x);
    for_rows(pool, rows, hidden * routing.top_k, &|row| {
        // SAFETY: one job per row; the level is available (the acts were made for it).
        let out = unsafe { x.part(row * hidden, hidden) };
        for choice in row * routing.top_k..(row + 1) * routing.top_k {
            let from = positions[choice] as usize * hidden;
            // SAFETY: as above.
            unsafe { add_scaled(out, routing.weights[choice], &outputs[from..from + hidden]) }
        }
    });
}

/// One dispatch over all active experts: jobs are chunks of an expert's panels.
fn run_experts(pool: &Pool, acts: &Acts, matrices: &[Matrix], active: &[u32], starts: &[usize], sink: &Sink<'_>) {
    let panels = matrices[active[0] as usize].panels();
    let k = acts.k();
    // The share that one job takes is set as if all experts were one matrix.
    let mean_rows = acts.rows().div_ceil(active.len());
    let per_job = panels_per_job(pool, mean_rows, panels * active.len(), k).min(panels);
    let jobs_each = panels.div_ceil(per_job);
    pool.run(active.len() * jobs_each, &|job, _| {
        let expert = active[job / jobs_each];
        let first = job % jobs_each * per_job;
        // SAFETY: `check` passed for the pair, all matrices have the same shape, the sink has room for all sorted
        // positions, and jobs have disjoint (expert, panels).
        unsafe {
            run_panels(
                acts,
                MoeScratch::range(starts, expert),
                &matrices[expert as usize],
                first..(first + per_job).min(panels),
                sink,
            );
        }
    });
}
