//! Does a real checkpoint answer as transformers does? Compares greedy ids with the folder's `golden.json` (see
//! `make_golden.py` and `smollm2_to_ernie.py`), per weight kind.
//!
//! `check_golden MODEL [f32|bf16|int8|int4 ...]` prints, per prompt, how many ids agree before the first difference.

use ernie_engine::runner::cpu::CpuRunner;
use ernie_engine::runner::options::{Dtype, LoadOptions, Quantization};
use ernie_engine::runner::{BatchSequence, ModelRunner, Row, SampleRow, StepBatch, Want};
use serde_json::Value;

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().into_iter().flatten().filter_map(Value::as_u64).map(|id| id as u32).collect()
}

fn greedy(runner: &mut CpuRunner, prompt: &[u32], steps: usize) -> Result<Vec<u32>, String> {
    let table: Vec<u32> = (0..(prompt.len() + steps).div_ceil(16) as u32).collect();
    let (mut next, mut from, mut answer) = (prompt.to_vec(), 0u32, Vec::new());
    while answer.len() < steps {
        let len = next.len() as u32;
        let step = StepBatch {
            positions: (from..from + len).collect(),
            slots: (from..from + len).collect(),
            sequences: vec![BatchSequence {
                token_start: 0,
                token_len: len,
                context_len: from + len,
                table_start: 0,
                table_len: table.len() as u32,
            }],
            block_tables: table.clone(),
            sample_rows: vec![SampleRow { token: len - 1, want: Want::Greedy }],
            copies: Vec::new(),
            tokens: next,
        };
        runner.execute(&step).map_err(|e| e.to_string())?;
        let Row::Greedy { token, .. } = runner.row(0) else { return Err("greedy was wanted".to_owned()) };
        answer.push(token);
        from += len;
        next = vec![token];
    }
    Ok(answer)
}

fn main() -> Result<(), String> {
    let mut given = std::env::args().skip(1);
    let model = std::path::PathBuf::from(given.next().ok_or("which model folder?")?);
    let text = std::fs::read_to_string(model.join("golden.json")).map_err(|e| format!("golden.json: {e}"))?;
    let golden: Value = serde_json::from_str(&text).map_err(|e| format!("golden.json: {e}"))?;
    let kinds: Vec<String> = given.collect();
    let kinds = if kinds.is_empty() { vec!["f32".to_owned(), "bf16".to_owned()] } else { kinds };
    for kind in &kinds {
        let (dtype, quantization) = match kind.as_str() {
            "f32" => (Dtype::Float32, Quantization::None),
            "bf16" => (Dtype::Bfloat16, Quantization::None),
            "int8" => (Dtype::Auto, Quantization::Int8),
            "int4" => (Dtype::Auto, Quantization::Int4),
            other => return Err(format!("{other} is no weight kind")),
        };
        let options = LoadOptions { dtype, quantization, max_model_len: Some(1024), ..LoadOptions::new(&model) };
        let mut runner = CpuRunner::load(&options, &mut |_| {}).map_err(|e| e.to_string())?;
        let (mut equal, mut all) = (0, 0);
        for prompt in golden["prompts"].as_array().into_iter().flatten() {
            let expected = ids(&prompt["greedy"]);
            let got = greedy(&mut runner, &ids(&prompt["ids"]), expected.len())?;
            let agree = got.iter().zip(&expected).take_while(|(a, b)| a == b).count();
            println!("{kind:>5} {}: {agree} of {} ids", prompt["name"], expected.len());
            equal += usize::from(agree == expected.len());
            all += 1;
        }
        println!("{kind:>5}: {equal} of {all} prompts equal");
    }
    Ok(())
}
