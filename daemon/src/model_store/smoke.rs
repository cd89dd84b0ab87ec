//! `smoke.json`: what a candidate is asked before it serves.
//!
//! ```json
//! {"min_tokens_per_second": 5,
//!  "prompts": [{"messages": [{"role": "user", "content": "你好"}], "expect": "你好", "max_tokens": 32},
//!              {"prompt": "The capital of France is", "expect_any": ["Paris", "paris"]}]}
//! ```

use serde::Deserialize;
use std::path::Path;

/// Answers longer than this prove nothing more.
const MAX_TOKENS_MAX: u32 = 512;

/// Prompts beyond this only delay the rollout.
const PROMPTS_MAX: usize = 64;

/// What to ask.
#[derive(Debug, Clone, PartialEq)]
pub struct SmokeSuite {
    pub prompts: Vec<SmokePrompt>,
    /// Slower is a failure. `None`: only the comparison with the serving model counts.
    pub min_tokens_per_second: Option<f64>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct SmokePrompt {
    pub text: SmokeText,
    /// The answer must contain one of these. Empty: any answer.
    pub expect_any: Vec<String>,
    pub max_tokens: u32,
}

#[derive(Debug, Clone, PartialEq)]
pub enum SmokeText {
    /// As it stands.
    Prompt(String),
    /// Through the chat template: role and content.
    Messages(Vec<(String, String)>),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("smoke.json can not be used: {0}")]
pub struct SmokeError(String);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    min_tokens_per_second: Option<f64>,
    prompts: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    messages: Option<Vec<Message>>,
    #[serde(default)]
    expect: Option<String>,
    #[serde(default)]
    expect_any: Vec<String>,
    #[serde(default = "max_tokens")]
    max_tokens: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Message {
    role: String,
    content: String,
}

fn max_tokens() -> u32 {
    32
}

impl Default for SmokeSuite {
    /// A greeting in both languages; any answer will do that is no noise.
    fn default() -> Self {
        let ask = |text: &str| SmokePrompt {
            text: SmokeText::Messages(vec![("user".to_string(), text.to_string())]),
            expect_any: Vec::new(),
            max_tokens: max_tokens(),
        };
        Self { prompts: vec![ask("请用一句话介绍人工智能"), ask("Hello")], min_tokens_per_second: None }
    }
}

impl SmokeSuite {
    /// The suite of a model folder, or the default.
    pub fn read(dir: &Path) -> Result<Self, SmokeError> {
        match std::fs::read_to_string(dir.join("smoke.json")) {
            Ok(text) => Self::parse(&text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(SmokeError(error.to_string())),
        }
    }

    pub fn parse(text: &str) -> Result<Self, SmokeError> {
        let file: File = serde_json::from_str(text).map_err(|error| SmokeError(error.to_string()))?;
        if file.prompts.is_empty() || file.prompts.len() > PROMPTS_MAX {
            return Err(SmokeError(format!("{} prompts; between 1 and {PROMPTS_MAX} are asked", file.prompts.len())));
        }
        let prompts = file.prompts.into_iter().enumerate().map(|(index, entry)| {
            let text = match (entry.prompt, entry.messages) {
                (Some(prompt), None) => SmokeText::Prompt(prompt),
                (None, Some(messages)) => {
                    SmokeText::Messages(messages.into_iter().map(|message| (message.role, message.content)).collect())
                }
                _ => return Err(SmokeError(format!("prompts[{index}] needs either \"prompt\" or \"messages\""))),
            };
            if !(1..=MAX_TOKENS_MAX).contains(&entry.max_tokens) {
                let what = entry.max_tokens;
                return Err(SmokeError(format!("prompts[{index}].max_tokens is {what}, not 1 to {MAX_TOKENS_MAX}")));
            }
            let expect_any = entry.expect.into_iter().chain(entry.expect_any).collect();
            Ok(SmokePrompt { text, expect_any, max_tokens: entry.max_tokens })
        });
        Ok(Self { prompts: prompts.collect::<Result<_, _>>()?, min_tokens_per_second: file.min_tokens_per_second })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suite_is_read_with_its_defaults() {
        let suite = SmokeSuite::parse(
            r#"{"min_tokens_per_second": 5, "prompts": [
                {"prompt": "1 + 1 =", "expect": "2", "max_tokens": 4},
                {"messages": [{"role": "user", "content": "你好"}], "expect_any": ["你好", "您好"]}]}"#,
        )
        .expect("valid");
        assert_eq!(suite.min_tokens_per_second, Some(5.0));
        assert_eq!(suite.prompts[0].text, SmokeText::Prompt("1 + 1 =".to_string()));
        assert_eq!(suite.prompts[0].expect_any, ["2"]);
        assert_eq!((suite.prompts[1].max_tokens, suite.prompts[1].expect_any.len()), (32, 2));
    }

    #[test]
    fn what_can_not_be_meant_is_refused_by_name() {
        for (text, what) in [
            ("{}", "prompts"),
            (r#"{"prompts": []}"#, "0 prompts"),
            (r#"{"prompts": [{"expect": "2"}]}"#, "prompts[0] needs either"),
            (r#"{"prompts": [{"prompt": "a", "max_tokens": 0}]}"#, "prompts[0].max_tokens is 0"),
            (r#"{"prompts": [{"prompt": "a", "expcet": "b"}]}"#, "expcet"),
        ] {
            let error = SmokeSuite::parse(text).expect_err(text).to_string();
            assert!(error.contains(what), "{error}");
        }
        assert_eq!(SmokeSuite::read(Path::new("/nowhere")), Ok(SmokeSuite::default()));
    }
}
