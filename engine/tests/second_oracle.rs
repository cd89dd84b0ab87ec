//! A second oracle beside the goldens: candle-transformers' Llama. Dense ERNIE is a Llama whose rotation turns neighbours;
//! with the rows of q and k reordered, half-split rotation computes the same function.

mod common;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama};
use common::*;
use serde_json::json;
use std::collections::HashMap;

/// Row `i` of a head comes from `2i`, row `i + head_dim/2` from `2i + 1`.
fn for_half_split(tensor: &Stored, head_dim: usize) -> Vec<f32> {
    let (values, columns) = (tensor.values(), tensor.shape[1]);
    let from = |r: usize| {
        let (head, i) = (r / head_dim * head_dim, r % head_dim);
        if i < head_dim / 2 { head + 2 * i } else { head + 2 * (i - head_dim / 2) + 1 }
    };
    (0..tensor.shape[0]).flat_map(|r| values[from(r) * columns..][..columns].to_vec()).collect()
}

#[test]
fn dense_ernie_is_a_llama_with_neighbouring_rotation() {
    let mut config = random_config(false);
    config["num_attention_heads"] = json!(4);
    config["head_dim"] = json!(32);
    config["tie_word_embeddings"] = json!(false);
    let tensors = random_tensors(&config, 21);
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path(), &config, &tensors);

    let vars: HashMap<String, Tensor> = tensors
        .iter()
        .map(|(name, t)| {
            let rotated = name.contains("q_proj") || name.contains("k_proj");
            let values = if rotated { for_half_split(t, 32) } else { t.values() };
            (name.clone(), Tensor::from_vec(values, t.shape.clone(), &Device::Cpu).unwrap())
        })
        .collect();
    let llama = Config {
        hidden_size: 128,
        intermediate_size: 192,
        vocab_size: 515,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 10000.0,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: 1024,
        tie_word_embeddings: false,
    };
    let oracle = Llama::load(VarBuilder::from_tensors(vars, DType::F32, &Device::Cpu), &llama).unwrap();
    let ids = random_tokens(1, 200, 515);
    let rows = alone(&mut load(&small_f32(dir.path())), &ids);
    for len in [1, 17, 129, 200] {
        let mut cache = Cache::new(false, DType::F32, &llama, &Device::Cpu).unwrap();
        let input = Tensor::new(&ids[..len], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        let logits = oracle.forward(&input, 0, &mut cache).unwrap().squeeze(0).unwrap().to_vec1::<f32>().unwrap();
        let row = &rows[&(len - 1)];
        let worst = logits.iter().zip(row).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-3, "after {len} tokens a logit differs by {worst}");
    }
}
