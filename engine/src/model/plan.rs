//! In which form each part of the model lies in memory: weight kinds, and what activations are converted to for them.

use super::weights::RowKind;
use ernie_kernels::{ActKind, KvKind, WeightKind};

/// A weight kind and the activations that go with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    pub weights: WeightKind,
    pub acts: ActKind,
}

impl From<WeightKind> for Form {
    fn from(weights: WeightKind) -> Self {
        Self { weights, acts: weights.default_act_kind() }
    }
}

impl Form {
    /// With one activation scale per 128 values instead of one per row, where activations are quantised at all.
    pub fn grouped(self) -> Self {
        if self.is_quantized() { Self { acts: ActKind::I8Group128, ..self } } else { self }
    }

    pub fn is_quantized(self) -> bool {
        !matches!(self.weights, WeightKind::F32 | WeightKind::Bf16)
    }
}

/// The forms of a whole model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightPlan {
    /// Attention, and gate and up of dense MLPs and shared experts.
    pub linear: Form,
    /// Down projections of dense MLPs and shared experts: their inputs have the outliers.
    pub down: Form,
    /// Gate and up of routed experts.
    pub experts: Form,
    pub experts_down: Form,
    pub head: Form,
    /// Values of the embedding when it is not looked up in the packed head.
    pub embedding: RowKind,
    pub kv: KvKind,
    pub turn: Turn,
}

/// What is turned so that no channel stands out (`ernie_kernels::rotation`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Turn {
    #[default]
    Nothing,
    /// The residual stream: costs nothing at run time.
    Stream,
    /// Also values, head by head, which costs nothing either, and inputs of down projections, in every step.
    All,
}

impl WeightPlan {
    pub fn float32() -> Self {
        Self { embedding: RowKind::F32, kv: KvKind::F32, ..Self::uniform(WeightKind::F32) }
    }

    /// Everything in `kind`, the head too; bf16 embedding and KV.
    pub fn uniform(kind: WeightKind) -> Self {
        let form = Form::from(kind);
        let (embedding, kv) = (RowKind::Bf16, KvKind::Bf16);
        Self {
            linear: form,
            down: form,
            experts: form,
            experts_down: form,
            head: form,
            embedding,
            kv,
            turn: Turn::Nothing,
        }
    }

    /// All quantised parts with grouped activation scales.
    pub fn grouped(self) -> Self {
        Self {
            linear: self.linear.grouped(),
            experts: self.experts.grouped(),
            head: self.head.grouped(),
            ..self.grouped_down()
        }
    }

    /// Down projections with grouped activation scales.
    pub fn grouped_down(self) -> Self {
        Self { down: self.down.grouped(), experts_down: self.experts_down.grouped(), ..self }
    }

    pub fn turned(self, turn: Turn) -> Self {
        Self { turn, ..self }
    }

    pub fn with_head(self, head: impl Into<Form>) -> Self {
        Self { head: head.into(), ..self }
    }

    /// Short name: `f32`, `bf16`, `int8`, `int4`.
    pub fn name(&self) -> &'static str {
        match self.linear.weights {
            WeightKind::F32 => "f32",
            WeightKind::Bf16 => "bf16",
            WeightKind::Int8 | WeightKind::Int8Group { .. } => "int8",
            WeightKind::Int4 { .. } => "int4",
        }
    }

    /// Reads a measurement's plan: a kind (`f32 bf16 int8 int8g128 int4g32 int4g64 int4g128`, the int4 ones also with `zp`),
    /// then any of `-ag` (grouped activation scales everywhere), `-dg` (in down projections), `-h16` (bf16 head), `-r`
    /// (turned residual stream), `-rr` (all turned), `-kv8` (8-bit K and V). The head of int4 has 8 bits.
    pub fn parse(name: &str) -> Option<Self> {
        let mut parts = name.split('-');
        let kind = parts.next()?;
        let group = |digits: &str| digits.parse().ok().filter(|g| [32, 64, 128].contains(g));
        let mut plan = if let Some(rest) = kind.strip_prefix("int4g") {
            let zero_point = rest.ends_with("zp");
            let group = group(rest.trim_end_matches("zp"))?;
            Self::uniform(WeightKind::Int4 { group, zero_point }).with_head(WeightKind::Int8)
        } else if let Some(digits) = kind.strip_prefix("int8g") {
            Self::uniform(WeightKind::Int8Group { group: group(digits)? })
        } else {
            match kind {
                "f32" => Self::float32(),
                "bf16" => Self::uniform(WeightKind::Bf16),
                "int8" => Self::uniform(WeightKind::Int8),
                _ => return None,
            }
        };
        for part in parts {
            plan = match part {
                "ag" => plan.grouped(),
                "dg" => plan.grouped_down(),
                "r" => plan.turned(Turn::Stream),
                "rr" => plan.turned(Turn::All),
                "h16" => plan.with_head(WeightKind::Bf16),
                "kv8" => Self { kv: KvKind::Int8, ..plan },
                _ => return None,
            };
        }
        Some(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_plans_have_names() {
        assert_eq!(WeightPlan::parse("f32"), Some(WeightPlan::float32()));
        assert_eq!(WeightPlan::parse("int8-ag"), Some(WeightPlan::uniform(WeightKind::Int8).grouped()));
        let int4 = WeightPlan::parse("int4g128zp-dg-h16").unwrap();
        assert_eq!(int4.linear, WeightKind::Int4 { group: 128, zero_point: true }.into());
        assert_eq!((int4.down.acts, int4.head), (ActKind::I8Group128, WeightKind::Bf16.into()));
        assert_eq!(WeightPlan::parse("bf16-ag"), Some(WeightPlan::uniform(WeightKind::Bf16)), "nothing is quantised");
        let narrow = WeightPlan::parse("bf16-kv8").unwrap();
        assert_eq!(narrow, WeightPlan { kv: KvKind::Int8, ..WeightPlan::uniform(WeightKind::Bf16) });
        for name in ["", "int3", "int4g100", "int4", "int8-x"] {
            assert_eq!(WeightPlan::parse(name), None, "{name}");
        }
    }
}
