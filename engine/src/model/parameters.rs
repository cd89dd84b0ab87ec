//! Every parameter of a model by its name in the files, with its shape: what a checkpoint must hold, exactly once each.

use super::config::ModelConfig;

/// One tensor that must be in the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    pub name: String,
    /// As stored: `[out, in]` for linear layers.
    pub shape: Vec<usize>,
}

/// All parameters, in the order in which the forward pass uses them (the head, when it is the embedding, not again).
pub fn parameters(config: &ModelConfig) -> Vec<Parameter> {
    let hidden = config.hidden_size;
    let mut list = Vec::new();
    let mut add = |name: String, shape: &[usize]| list.push(Parameter { name, shape: shape.to_vec() });
    add(EMBEDDING.to_owned(), &[config.vocab_size, hidden]);
    for layer in 0..config.num_layers {
        let names = LayerNames::new(layer);
        add(names.input_norm(), &[hidden]);
        add(names.attention("q"), &[config.q_width(), hidden]);
        add(names.attention("k"), &[config.kv_width(), hidden]);
        add(names.attention("v"), &[config.kv_width(), hidden]);
        add(names.attention("o"), &[hidden, config.q_width()]);
        add(names.post_norm(), &[hidden]);
        let mut mlp = |prefix: String, width: usize| {
            add(linear(&prefix, "gate"), &[width, hidden]);
            add(linear(&prefix, "up"), &[width, hidden]);
            add(linear(&prefix, "down"), &[hidden, width]);
        };
        match &config.moe {
            Some(moe) if config.is_moe_layer(layer) => {
                for expert in 0..moe.num_experts {
                    mlp(names.expert(expert), moe.intermediate_size);
                }
                if moe.num_shared_experts > 0 {
                    mlp(names.shared_experts(), moe.intermediate_size * moe.num_shared_experts);
                }
                add(names.router(), &[moe.num_experts, hidden]);
                add(names.router_bias(), &[1, moe.num_experts]);
            }
            _ => mlp(names.mlp(), config.intermediate_size),
        }
    }
    add(FINAL_NORM.to_owned(), &[hidden]);
    if !config.tie_word_embeddings {
        add(HEAD.to_owned(), &[config.vocab_size, hidden]);
    }
    list
}

pub const EMBEDDING: &str = "model.embed_tokens.weight";
pub const FINAL_NORM: &str = "model.norm.weight";
pub const HEAD: &str = "lm_head.weight";

/// Tensors that files may hold and this model does not use: the draft layers of multi-token prediction, and a copy of the
/// embedding as head when the config says that they are tied.
pub fn is_known_and_skipped(config: &ModelConfig, name: &str) -> bool {
    name.starts_with("model.mtp_") || (name == HEAD && config.tie_word_embeddings)
}

/// `PREFIX.{gate,up,down}_proj.weight`.
pub(crate) fn linear(prefix: &str, part: &str) -> String {
    format!("{prefix}.{part}_proj.weight")
}

/// Names of one decoder layer's tensors.
#[derive(Debug, Clone)]
pub(crate) struct LayerNames(String);

impl LayerNames {
    pub(crate) fn new(layer: usize) -> Self {
        Self(format!("model.layers.{layer}"))
    }

    pub(crate) fn input_norm(&self) -> String {
        format!("{}.input_layernorm.weight", self.0)
    }

    pub(crate) fn post_norm(&self) -> String {
        format!("{}.post_attention_layernorm.weight", self.0)
    }

    pub(crate) fn attention(&self, part: &str) -> String {
        format!("{}.self_attn.{part}_proj.weight", self.0)
    }

    pub(crate) fn mlp(&self) -> String {
        format!("{}.mlp", self.0)
    }

    pub(crate) fn expert(&self, expert: usize) -> String {
        format!("{}.mlp.experts.{expert}", self.0)
    }

    pub(crate) fn shared_experts(&self) -> String {
        format!("{}.mlp.shared_experts", self.0)
    }

    pub(crate) fn router(&self) -> String {
        format!("{}.mlp.gate.weight", self.0)
    }

    pub(crate) fn router_bias(&self) -> String {
        format!("{}.mlp.moe_statics.e_score_correction_bias", self.0)
    }
}
