//! Reads `config.json` of an ERNIE-4.5 text model into plain values.
//!
//! Accepts every spelling that published files use and refuses by name what is not implemented: a value that is read over
//! silently would make a model that answers wrongly. All problems of a file are reported at once. Tensor names and shapes
//! are not here; they follow from these values in `parameters.rs`.

use ernie_kernels::ops::EXPERTS_MAX;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// `config.json` files have a few kilobytes; nothing larger is read.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// Shape and constants of a model, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// As the file spells it, for display.
    pub architecture: String,
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// Width of the dense MLPs.
    pub intermediate_size: usize,
    pub num_layers: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    /// Not always `hidden_size / num_heads`.
    pub head_dim: usize,
    pub rms_norm_eps: f32,
    pub rope_theta: f32,
    pub max_position_embeddings: usize,
    /// The head is the embedding; a `lm_head.weight` in the files is then ignored.
    pub tie_word_embeddings: bool,
    /// Number type that the file names for its weights.
    pub dtype: ConfigDtype,
    pub moe: Option<MoeConfig>,
}

/// The mixture-of-experts part.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    pub num_experts: usize,
    pub top_k: usize,
    pub intermediate_size: usize,
    /// Width of the shared MLP in units of `intermediate_size`; 0: none.
    pub num_shared_experts: usize,
    pub layer_start: usize,
    /// Last MoE layer, inclusive.
    pub layer_end: usize,
    pub layer_interval: usize,
    /// Smallest divisor when the chosen experts' weights are renormalised.
    pub norm_min: f32,
}

/// `torch_dtype` of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigDtype {
    Bfloat16,
    Float16,
    Float32,
}

impl ModelConfig {
    /// Reads and checks `config.json` of a model folder; also gives its text, for its digest.
    pub fn read(dir: &Path) -> Result<(Self, String), ConfigError> {
        let file = dir.join("config.json");
        let read = |source| ConfigError::Read { file: file.clone(), source };
        let bytes = std::fs::metadata(&file).map_err(read)?.len();
        if bytes > CONFIG_BYTES_MAX {
            return Err(ConfigError::TooLarge { file, bytes });
        }
        let text = std::fs::read_to_string(&file).map_err(read)?;
        Ok((Self::parse(&file, &text)?, text))
    }

    /// Checks the text of a `config.json`; `file` is only for messages.
    pub fn parse(file: &Path, text: &str) -> Result<Self, ConfigError> {
        let value: Value =
            serde_json::from_str(text).map_err(|source| ConfigError::Json { file: file.to_path_buf(), source })?;
        let Value::Object(map) = value else {
            return Err(ConfigError::NotAnObject { file: file.to_path_buf() });
        };
        let mut fields = Fields { map: &map, problems: Vec::new() };
        let config = parse_fields(&mut fields);
        match config {
            Some(config) if fields.problems.is_empty() => Ok(config),
            _ => Err(ConfigError::Refused { file: file.to_path_buf(), problems: fields.problems }),
        }
    }

    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all key heads together.
    pub fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    pub fn is_moe_layer(&self, layer: usize) -> bool {
        self.moe.as_ref().is_some_and(|m| {
            (layer + 1).is_multiple_of(m.layer_interval) && layer >= m.layer_start && layer <= m.layer_end
        })
    }

    /// Parameters that the model has, embedding counted once when tied.
    pub fn parameters(&self) -> u64 {
        self.count_parameters(|m| m.num_experts)
    }

    /// Parameters that one token passes through.
    pub fn parameters_active(&self) -> u64 {
        self.count_parameters(|m| m.top_k)
    }

    fn count_parameters(&self, experts: impl Fn(&MoeConfig) -> usize) -> u64 {
        let hidden = self.hidden_size as u64;
        let attention = hidden * (2 * self.q_width() + 2 * self.kv_width()) as u64;
        let mlp = |width: usize| 3 * hidden * width as u64;
        let layers: u64 = (0..self.num_layers)
            .map(|layer| {
                let block = match &self.moe {
                    Some(m) if self.is_moe_layer(layer) => {
                        experts(m) as u64 * mlp(m.intermediate_size)
                            + mlp(m.intermediate_size * m.num_shared_experts)
                            + m.num_experts as u64 * (hidden + 1)
                    }
                    _ => mlp(self.intermediate_size),
                };
                attention + block + 2 * hidden
            })
            .sum();
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        layers + hidden + tables * hidden * self.vocab_size as u64
    }
}

/// Why a `config.json` is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{} can not be read: {source}; a model folder needs config.json", file.display())]
    Read { file: PathBuf, source: std::io::Error },
    #[error("{} has {bytes} bytes, which no config.json has; check that the file is what its name says", file.display())]
    TooLarge { file: PathBuf, bytes: u64 },
    #[error("{} is not valid JSON: {source}; copy the file again from its source", file.display())]
    Json { file: PathBuf, source: serde_json::Error },
    #[error("{} is not a JSON object; copy the file again from its source", file.display())]
    NotAnObject { file: PathBuf },
    #[error("{}: {}", file.display(), join(problems))]
    Refused { file: PathBuf, problems: Vec<ConfigProblem> },
}

/// One field that is missing, malformed or not implemented.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} = {value}: {cause}; {remedy}")]
pub struct ConfigProblem {
    pub field: String,
    /// The value as JSON, or `(absent)`.
    pub value: String,
    pub cause: String,
    pub remedy: String,
}

fn join(problems: &[ConfigProblem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  ")
}

const OTHER_MODEL: &str = "use an ERNIE-4.5 text model (ERNIE-4.5-0.3B-PT, 21B-A3B-PT, 300B-A47B-PT or alike)";
const OTHER_VALUE: &str = "use a checkpoint with another value; ernied does not guess";

/// The fields of one file and what was found wrong with them.
struct Fields<'a> {
    map: &'a Map<String, Value>,
    problems: Vec<ConfigProblem>,
}

impl Fields<'_> {
    /// The value, unless absent or null.
    fn get(&self, field: &str) -> Option<&Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    fn refuse(&mut self, field: &str, cause: impl Into<String>, remedy: impl Into<String>) {
        let value = self.map.get(field).map_or_else(|| "(absent)".to_owned(), short);
        self.problems.push(ConfigProblem {
            field: field.to_owned(),
            value,
            cause: cause.into(),
            remedy: remedy.into(),
        });
    }

    /// A whole number in `low..=high`; `None` when absent or refused.
    fn whole(&mut self, field: &str, low: usize, high: usize) -> Option<usize> {
        let value = self.get(field)?;
        if value.is_array() {
            self.refuse(
                field,
                "lists belong to the vision models (ERNIE-4.5-VL), which are not implemented",
                OTHER_MODEL,
            );
            return None;
        }
        match value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (low..=high).contains(n)) {
            Some(n) => Some(n),
            None => {
                self.refuse(field, format!("must be a whole number from {low} to {high}"), OTHER_VALUE);
                None
            }
        }
    }

    fn required(&mut self, field: &str, low: usize, high: usize) -> Option<usize> {
        if self.get(field).is_none() {
            self.refuse(field, "the field is needed", "copy config.json again from the model's source");
        }
        self.whole(field, low, high)
    }

    fn positive(&mut self, field: &str, default: f64) -> f64 {
        let Some(value) = self.get(field) else { return default };
        match value.as_f64().filter(|x| x.is_finite() && *x > 0.0) {
            Some(x) => x,
            None => {
                self.refuse(field, "must be a number above 0", OTHER_VALUE);
                default
            }
        }
    }

    fn flag(&mut self, field: &str, default: bool) -> bool {
        let Some(value) = self.get(field) else { return default };
        match value.as_bool() {
            Some(b) => b,
            None => {
                self.refuse(field, "must be true or false", OTHER_VALUE);
                default
            }
        }
    }

    /// A switch of which only one position is implemented.
    fn only(&mut self, field: &str, implemented: bool, cause: &str) {
        if self.flag(field, implemented) != implemented {
            self.refuse(field, cause, OTHER_VALUE);
        }
    }

    /// A text field of which only some values are implemented.
    fn one_of(&mut self, field: &str, implemented: &[&str]) {
        let Some(value) = self.get(field) else { return };
        if !value.as_str().is_some_and(|s| implemented.contains(&s)) {
            self.refuse(field, format!("only {} is implemented", implemented.join(", ")), OTHER_VALUE);
        }
    }

    /// A number under two spellings; if both are there they must agree.
    fn aliased(&mut self, field: &str, alias: &str, low: usize, high: usize) -> Option<usize> {
        let (a, b) = (self.whole(field, low, high), self.whole(alias, low, high));
        if let (Some(a), Some(b)) = (a, b)
            && a != b
        {
            self.refuse(alias, format!("differs from {field} = {a}"), "remove the wrong one of the two");
        }
        a.or(b)
    }
}

/// A value as JSON, cut to a length that fits a line.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Dense,
    Moe,
}

/// `None` when something needed is missing; the reasons are then in `fields.problems`.
fn parse_fields(fields: &mut Fields<'_>) -> Option<ModelConfig> {
    let (kind, architecture) = parse_kind(fields)?;
    refuse_what_is_not_implemented(fields);

    // The bounds are far above every published model; they keep products of sizes inside 64 bits.
    let hidden_size = fields.required("hidden_size", 32, 1 << 16);
    let intermediate_size = fields.required("intermediate_size", 32, 1 << 20);
    let num_layers = fields.required("num_hidden_layers", 1, 1024);
    let num_heads = fields.required("num_attention_heads", 1, 1024);
    let num_kv_heads = fields.required("num_key_value_heads", 1, 1024);
    let vocab_size = fields.required("vocab_size", 2, 1 << 24);
    let max_position_embeddings = fields.required("max_position_embeddings", 1, 1 << 24);
    let head_dim = fields.whole("head_dim", 2, 1024);
    let rms_norm_eps = fields.positive("rms_norm_eps", 1e-5) as f32;
    let rope_theta = parse_rope(fields);
    let tie_word_embeddings = fields.flag("tie_word_embeddings", true);
    let dtype = parse_dtype(fields);
    let moe = match kind {
        Kind::Moe => Some(parse_moe(fields, num_layers?)),
        Kind::Dense => None,
    };

    let (hidden_size, num_heads, num_kv_heads) = (hidden_size?, num_heads?, num_kv_heads?);
    let head_dim = head_dim.unwrap_or(match kind {
        // transformers' defaults: the dense class says 128, the MoE class divides.
        Kind::Dense => 128,
        Kind::Moe => hidden_size / num_heads,
    });
    let config = ModelConfig {
        architecture,
        vocab_size: vocab_size?,
        hidden_size,
        intermediate_size: intermediate_size?,
        num_layers: num_layers?,
        num_heads,
        num_kv_heads,
        head_dim,
        rms_norm_eps,
        rope_theta,
        max_position_embeddings: max_position_embeddings?,
        tie_word_embeddings,
        dtype,
        moe: match moe {
            Some(None) => return None,
            other => other.flatten(),
        },
    };
    check_sizes(fields, &config);
    Some(config)
}

/// Dense or MoE, from `architectures` and `model_type`, which must not contradict each other.
fn parse_kind(fields: &mut Fields<'_>) -> Option<(Kind, String)> {
    let by_type = match fields.get("model_type").map(|v| v.as_str().unwrap_or("")) {
        None => None,
        Some("ernie4_5") => Some(Kind::Dense),
        Some("ernie4_5_moe") => Some(Kind::Moe),
        Some("ernie4_5_moe_vl" | "ernie4_5_vl_moe" | "ernie4_5_vl") => {
            fields.refuse("model_type", "vision models are not implemented", OTHER_MODEL);
            return None;
        }
        Some(_) => {
            fields.refuse("model_type", "not an ERNIE-4.5 text model", OTHER_MODEL);
            return None;
        }
    };
    let name = match fields.get("architectures") {
        None => None,
        Some(Value::Array(names)) if names.len() == 1 && names[0].is_string() => names[0].as_str().map(str::to_owned),
        Some(_) => {
            fields.refuse("architectures", "must be a list with one name", OTHER_MODEL);
            return None;
        }
    };
    let by_name = match name.as_deref() {
        None => None,
        Some("Ernie4_5ForCausalLM" | "Ernie4_5_ForCausalLM") => Some(Kind::Dense),
        Some("Ernie4_5_MoeForCausalLM" | "Ernie4_5MoeForCausalLM") => Some(Kind::Moe),
        Some(_) => {
            let known =
                "only Ernie4_5ForCausalLM (also Ernie4_5_ForCausalLM) and Ernie4_5_MoeForCausalLM are implemented";
            fields.refuse("architectures", known, OTHER_MODEL);
            return None;
        }
    };
    match (by_name, by_type) {
        (Some(a), Some(b)) if a != b => {
            fields.refuse("model_type", "contradicts architectures", "copy config.json again from the model's source");
            None
        }
        (None, None) => {
            fields.refuse("architectures", "neither architectures nor model_type says what this is", OTHER_MODEL);
            None
        }
        (a, b) => {
            let kind = a.or(b)?;
            let default = if kind == Kind::Moe { "Ernie4_5_MoeForCausalLM" } else { "Ernie4_5ForCausalLM" };
            Some((kind, name.unwrap_or_else(|| default.to_owned())))
        }
    }
}

fn refuse_what_is_not_implemented(fields: &mut Fields<'_>) {
    fields.one_of("hidden_act", &["silu"]);
    fields.one_of("moe_gate_act", &["softmax"]);
    fields.one_of("moe_gate", &["topk", "top2_fused", "topk_fused"]);
    for field in ["use_bias", "attention_bias", "mlp_bias"] {
        fields.only(field, false, "biases in linear layers are not implemented");
    }
    fields.only("use_rmsnorm", true, "only RMSNorm is implemented");
    fields.only("moe_use_aux_free", true, "routing without the correction bias is not implemented");
    fields.only("use_sliding_window", false, "sliding-window attention is not implemented");
    for (field, cause) in [
        ("compression_ratio", "scaled positions are not implemented (only 1.0)"),
        ("partial_rotary_factor", "rotary embedding of a part of the head is not implemented (only 1.0)"),
        ("routed_scaling_factor", "scaled expert outputs are not implemented (only 1.0)"),
    ] {
        if fields.get(field).is_some_and(|v| v.as_f64() != Some(1.0)) {
            fields.refuse(field, cause, OTHER_VALUE);
        }
    }
    for field in ["vision_config", "moe_num_attn_experts"] {
        if fields.get(field).is_some_and(|v| v.as_bool() != Some(false)) {
            fields.refuse(field, "vision models are not implemented", OTHER_MODEL);
        }
    }
    for field in ["quantization_config", "quantization"] {
        if fields.get(field).is_some() {
            fields.refuse(
                field,
                "weights that are quantised in the files are not implemented",
                "use the bf16 checkpoint and let ernied quantise it at load (--quantization int8 or int4)",
            );
        }
    }
}

/// `rope_theta` at the top, or inside `rope_parameters` as transformers 5 writes it; any scaling is refused.
fn parse_rope(fields: &mut Fields<'_>) -> f32 {
    let mut theta = fields.positive("rope_theta", 500_000.0);
    for field in ["rope_scaling", "rope_parameters"] {
        let Some(value) = fields.get(field) else { continue };
        let Some(map) = value.as_object() else {
            fields.refuse(field, "must be an object", OTHER_VALUE);
            continue;
        };
        let kind = map.get("rope_type").or_else(|| map.get("type"));
        let plain = kind.is_none_or(|k| k.as_str() == Some("default"));
        let known = ["rope_type", "type", "rope_theta"];
        let nested = map.get("rope_theta").map(Value::as_f64);
        if !plain || map.keys().any(|k| !known.contains(&k.as_str())) {
            fields.refuse(field, "scaled rotary embedding is not implemented (only rope_type default)", OTHER_VALUE);
        } else if let Some(nested) = nested {
            match nested.filter(|x| x.is_finite() && *x > 0.0) {
                Some(x) if fields.get("rope_theta").is_none() || x == theta => theta = x,
                _ => fields.refuse(
                    field,
                    "rope_theta in it is no number above 0, or differs from the outer one",
                    OTHER_VALUE,
                ),
            }
        }
    }
    theta as f32
}

/// `torch_dtype`, or `dtype` as transformers 5 writes it.
fn parse_dtype(fields: &mut Fields<'_>) -> ConfigDtype {
    let field = if fields.get("torch_dtype").is_some() { "torch_dtype" } else { "dtype" };
    match fields.get(field).map(|v| v.as_str().unwrap_or("")) {
        None | Some("bfloat16") => ConfigDtype::Bfloat16,
        Some("float16") => ConfigDtype::Float16,
        Some("float32") => ConfigDtype::Float32,
        Some(_) => {
            fields.refuse(field, "only bfloat16, float16 and float32 weights are implemented", OTHER_VALUE);
            ConfigDtype::Bfloat16
        }
    }
}

/// Absent fields take transformers' defaults.
fn parse_moe(fields: &mut Fields<'_>, num_layers: usize) -> Option<MoeConfig> {
    let num_experts = fields.aliased("moe_num_experts", "num_experts", 1, EXPERTS_MAX).unwrap_or(64);
    let top_k = fields.aliased("moe_k", "num_experts_per_tok", 1, EXPERTS_MAX).unwrap_or(6);
    if top_k > num_experts {
        fields.refuse("moe_k", format!("more than the {num_experts} experts there are"), OTHER_VALUE);
    }
    let num_shared_experts = fields.whole("moe_num_shared_experts", 0, 1 << 10);
    let num_shared_experts = num_shared_experts.unwrap_or(2);
    let layer_start = fields.whole("moe_layer_start_index", 0, num_layers).unwrap_or(1);
    let layer_interval = fields.whole("moe_layer_interval", 1, num_layers).unwrap_or(1);
    let layer_end = match fields.get("moe_layer_end_index").and_then(Value::as_i64) {
        Some(-1) => num_layers - 1,
        _ => fields.whole("moe_layer_end_index", 0, num_layers - 1).unwrap_or(num_layers - 1),
    };
    let norm_min = fields.positive("moe_norm_min", 1e-12) as f32;
    let intermediate_size = fields.required("moe_intermediate_size", 32, 1 << 20)?;
    Some(MoeConfig {
        num_experts,
        top_k,
        intermediate_size,
        num_shared_experts,
        layer_start,
        layer_end,
        layer_interval,
        norm_min,
    })
}

/// What the kernels ask of the sizes.
fn check_sizes(fields: &mut Fields<'_>, config: &ModelConfig) {
    let mut multiple = |field: &str, what: &str, size: usize, of: usize| {
        if !size.is_multiple_of(of) {
            fields.refuse(field, format!("{what} is {size}, which is no multiple of {of}"), OTHER_VALUE);
        }
    };
    multiple("hidden_size", "the hidden size", config.hidden_size, 32);
    multiple("intermediate_size", "the MLP width", config.intermediate_size, 32);
    multiple("head_dim", "the head size", config.head_dim, 16);
    multiple("num_attention_heads", "the width of all query heads", config.q_width(), 32);
    multiple("num_attention_heads", "the number of query heads", config.num_heads, config.num_kv_heads);
    if let Some(moe) = &config.moe {
        multiple("moe_intermediate_size", "the expert width", moe.intermediate_size, 32);
    }
    if config.head_dim > 256 {
        fields.refuse("head_dim", format!("the head size is {}; the most is 256", config.head_dim), OTHER_VALUE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn dense() -> Value {
        json!({"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "hidden_size": 1024,
            "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2,
            "head_dim": 128, "vocab_size": 103424, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000,
            "rope_scaling": null, "max_position_embeddings": 131072, "tie_word_embeddings": true, "use_bias": false,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": false, "torch_dtype": "bfloat16",
            "auto_map": {"AutoModel": "modeling.X"}})
    }

    fn moe() -> Value {
        json!({"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "hidden_size": 2560,
            "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
            "vocab_size": 103424, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
            "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": true, "max_position_embeddings": 131072,
            "rope_theta": 500000.0, "tie_word_embeddings": true, "num_nextn_predict_layers": 1})
    }

    fn parse(value: &Value) -> Result<ModelConfig, ConfigError> {
        ModelConfig::parse(Path::new("m/config.json"), &value.to_string())
    }

    fn with(mut base: Value, field: &str, value: Value) -> Value {
        base[field] = value;
        base
    }

    fn without(mut base: Value, field: &str) -> Value {
        base.as_object_mut().unwrap().remove(field);
        base
    }

    #[test]
    fn the_published_dense_config_is_read() {
        let config = parse(&dense()).unwrap();
        assert_eq!((config.q_width(), config.kv_width(), config.head_dim), (2048, 256, 128));
        assert_eq!(config.rope_theta, 500_000.0);
        assert_eq!(config.parameters(), 360_748_032);
        assert!(config.moe.is_none() && config.tie_word_embeddings);
    }

    #[test]
    fn the_published_moe_config_is_read_with_its_absent_fields() {
        let config = parse(&moe()).unwrap();
        assert_eq!(config.head_dim, 128);
        assert_eq!(config.parameters(), 21_825_437_888);
        assert!(!config.is_moe_layer(0) && config.is_moe_layer(1) && config.is_moe_layer(27));
        for field in
            ["moe_num_experts", "moe_k", "moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index"]
        {
            assert_eq!(parse(&without(moe(), field)).unwrap(), config, "{field} has its default");
        }
    }

    #[test]
    fn all_spellings_mean_the_same() {
        let plain = parse(&dense()).unwrap();
        let underscore = parse(&with(dense(), "architectures", json!(["Ernie4_5_ForCausalLM"]))).unwrap();
        assert_eq!(underscore, ModelConfig { architecture: "Ernie4_5_ForCausalLM".into(), ..plain.clone() });
        let nested =
            with(without(dense(), "rope_theta"), "rope_parameters", json!({"rope_theta": 1e4, "rope_type": "default"}));
        assert_eq!(parse(&nested).unwrap().rope_theta, 10_000.0);
        let dtype = with(without(dense(), "torch_dtype"), "dtype", json!("float32"));
        assert_eq!(parse(&dtype).unwrap().dtype, ConfigDtype::Float32);
        assert_eq!(parse(&without(dense(), "architectures")).unwrap(), plain);
        assert_eq!(parse(&without(dense(), "model_type")).unwrap(), plain);
        let alias = with(without(moe(), "moe_num_experts"), "num_experts", json!(32));
        assert_eq!(parse(&alias).unwrap().moe.unwrap().num_experts, 32);
    }

    #[test]
    fn every_third_layer_can_be_moe() {
        let value = with(with(moe(), "moe_layer_interval", json!(3)), "moe_layer_start_index", json!(3));
        let config = parse(&value).unwrap();
        let layers: Vec<_> = (0..28).filter(|&l| config.is_moe_layer(l)).collect();
        assert_eq!(layers, [5, 8, 11, 14, 17, 20, 23, 26]);
    }

    #[test]
    fn what_is_not_implemented_is_refused_by_file_field_value_and_remedy() {
        let cases = [
            (dense(), "rope_scaling", json!({"type": "linear", "factor": 2.0})),
            (dense(), "rope_parameters", json!({"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0})),
            (dense(), "rope_parameters", json!({"rope_theta": 1.0, "rope_type": "default"})),
            (dense(), "compression_ratio", json!(3.0)),
            (dense(), "use_bias", json!(true)),
            (dense(), "hidden_act", json!("gelu")),
            (dense(), "model_type", json!("llama")),
            (dense(), "model_type", json!("ernie4_5_moe")),
            (dense(), "architectures", json!(["LlamaForCausalLM"])),
            (dense(), "torch_dtype", json!("float8_e4m3fn")),
            (dense(), "quantization_config", json!({"quant_method": "gptq"})),
            (dense(), "hidden_size", json!(1000)),
            (dense(), "hidden_size", json!("1024")),
            (dense(), "hidden_size", json!(1e300)),
            (dense(), "num_hidden_layers", json!(-1)),
            (dense(), "rms_norm_eps", json!("small")),
            (moe(), "model_type", json!("ernie4_5_moe_vl")),
            (moe(), "moe_num_experts", json!([64, 64])),
            (moe(), "moe_intermediate_size", json!([1536, 512])),
            (moe(), "moe_gate_act", json!("sigmoid")),
            (moe(), "moe_gate", json!("hash")),
            (moe(), "moe_k", json!(65)),
            (moe(), "moe_layer_end_index", json!(28)),
            (moe(), "num_experts", json!(63)),
        ];
        for (base, field, value) in cases {
            let error = parse(&with(base, field, value.clone())).expect_err(&format!("{field} = {value}")).to_string();
            assert!(error.starts_with(&format!("m/config.json: {field} = {value}: ")), "{error}");
            assert!(error.contains("; "), "a remedy: {error}");
        }
    }

    #[test]
    fn all_problems_are_reported_at_once() {
        let value = without(with(with(dense(), "use_bias", json!(true)), "hidden_act", json!("gelu")), "vocab_size");
        let Err(ConfigError::Refused { problems, .. }) = parse(&value) else { panic!() };
        let fields: Vec<_> = problems.iter().map(|p| p.field.as_str()).collect();
        assert_eq!(fields, ["hidden_act", "use_bias", "vocab_size"]);
        assert_eq!(problems[2].value, "(absent)");
    }

    #[test]
    fn a_file_that_is_no_json_object_is_refused() {
        let path = Path::new("m/config.json");
        for text in ["", "{", "[]", "3", "{\"a\": nan}"] {
            let error = ModelConfig::parse(path, text).unwrap_err().to_string();
            assert!(error.starts_with("m/config.json "), "{error}");
        }
    }
}
