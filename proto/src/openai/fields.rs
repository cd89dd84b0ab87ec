//! Reads members of a JSON object one by one and says in vLLM's words what is wrong with them.
//!
//! As lenient as pydantic's default mode, since clients rely on it: null is absent, `"5"` is an integer, `5.0` too.

use serde_json::{Map, Value};
use std::fmt;

/// Most of a refused value that is shown back.
const INPUT_SHOWN_CHARS: usize = 64;

/// Where in a body a value stands: `body.messages.0.role`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loc(String);

impl Loc {
    pub fn body() -> Self {
        Self("body".into())
    }

    pub fn member(&self, name: &str) -> Self {
        Self(format!("{}.{name}", self.0))
    }

    pub fn item(&self, index: usize) -> Self {
        Self(format!("{}.{index}", self.0))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A value that does not have the form it must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldError {
    kind: &'static str,
    loc: String,
    message: String,
    input: String,
    context: Option<String>,
}

impl FieldError {
    pub fn new(kind: &'static str, loc: Loc, message: impl Into<String>, input: &Value) -> Self {
        Self { kind, loc: loc.0, message: message.into(), input: shown(input), context: None }
    }

    pub(crate) fn json(offset: usize, cause: &str) -> Self {
        Self {
            kind: "json_invalid",
            loc: format!("body.{offset}"),
            message: "JSON decode error".into(),
            input: "<dict of 0 items>".into(),
            context: Some(cause.to_owned()),
        }
    }

    /// The place, as `param` of an error answer.
    pub fn param(&self) -> &str {
        &self.loc
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "1 validation error:\n  {{'type': {}, 'loc': {}, 'msg': {}, 'input': {}",
            quoted(self.kind),
            quoted(&self.loc),
            quoted(&self.message),
            quoted(&self.input)
        )?;
        if let Some(cause) = &self.context {
            write!(f, ", 'ctx': {{'error': {}}}", quoted(cause))?;
        }
        f.write_str("}")
    }
}

impl std::error::Error for FieldError {}

/// As Python prints a string.
fn quoted(text: &str) -> String {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::with_capacity(text.len() + 2);
    out.push(mark);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == mark => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push(mark);
    out
}

/// A refused value in short.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Number(n) => n.to_string(),
        Value::String(s) if s.chars().nth(INPUT_SHOWN_CHARS).is_none() => s.clone(),
        Value::String(s) => format!("{}…", s.chars().take(INPUT_SHOWN_CHARS).collect::<String>()),
        Value::Array(items) => format!("<list of {} items>", items.len()),
        Value::Object(members) => format!("<dict of {} items>", members.len()),
    }
}

/// The members of one object; taken ones are gone, what is left is unknown.
#[derive(Debug)]
pub struct Fields {
    loc: Loc,
    members: Map<String, Value>,
    /// For "Field required", which shows the size of the object.
    size: usize,
}

impl Fields {
    pub fn new(loc: Loc, members: Map<String, Value>) -> Self {
        let size = members.len();
        Self { loc, members, size }
    }

    /// From a value that has to be an object.
    pub fn of(loc: Loc, value: Value) -> Result<Self, FieldError> {
        match value {
            Value::Object(members) => Ok(Self::new(loc, members)),
            other => Err(FieldError::new("dict_type", loc, "Input should be a valid dictionary", &other)),
        }
    }

    pub fn loc(&self, name: &str) -> Loc {
        self.loc.member(name)
    }

    pub fn has(&self, name: &str) -> bool {
        self.members.get(name).is_some_and(|v| !v.is_null())
    }

    /// Names that nobody took.
    pub fn unknown(self) -> Vec<String> {
        self.members.into_iter().map(|(name, _)| name).collect()
    }

    /// What nobody took.
    pub fn rest(self) -> Map<String, Value> {
        self.members
    }

    pub fn missing(&self, name: &str) -> FieldError {
        FieldError {
            kind: "missing",
            loc: self.loc(name).0,
            message: "Field required".into(),
            input: format!("<dict of {} items>", self.size),
            context: None,
        }
    }

    /// Takes a member; null is absent.
    pub fn value(&mut self, name: &str) -> Option<Value> {
        self.members.shift_remove(name).filter(|v| !v.is_null())
    }

    pub fn object(&mut self, name: &str) -> Result<Option<Fields>, FieldError> {
        let loc = self.loc(name);
        self.value(name).map(|v| Fields::of(loc, v)).transpose()
    }

    pub fn map(&mut self, name: &str) -> Result<Option<Map<String, Value>>, FieldError> {
        Ok(self.object(name)?.map(Fields::rest))
    }

    pub fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, FieldError> {
        let loc = self.loc(name);
        self.value(name).map(|v| as_list(loc, v)).transpose()
    }

    pub fn string(&mut self, name: &str) -> Result<Option<String>, FieldError> {
        let loc = self.loc(name);
        self.value(name).map(|v| as_string(&loc, v)).transpose()
    }

    pub fn bool(&mut self, name: &str) -> Result<Option<bool>, FieldError> {
        let loc = self.loc(name);
        self.value(name).map(|v| as_bool(&loc, &v)).transpose()
    }

    pub fn integer(&mut self, name: &str) -> Result<Option<i64>, FieldError> {
        let loc = self.loc(name);
        self.value(name).map(|v| as_integer(&loc, &v)).transpose()
    }

    pub fn number(&mut self, name: &str) -> Result<Option<f64>, FieldError> {
        let loc = self.loc(name);
        self.value(name).map(|v| as_number(&loc, &v)).transpose()
    }

    pub fn strings(&mut self, name: &str) -> Result<Option<Vec<String>>, FieldError> {
        let loc = self.loc(name);
        let Some(items) = self.list(name)? else { return Ok(None) };
        items.into_iter().enumerate().map(|(i, v)| as_string(&loc.item(i), v)).collect::<Result<_, _>>().map(Some)
    }

    pub fn integers(&mut self, name: &str) -> Result<Option<Vec<i64>>, FieldError> {
        let loc = self.loc(name);
        let Some(items) = self.list(name)? else { return Ok(None) };
        items.iter().enumerate().map(|(i, v)| as_integer(&loc.item(i), v)).collect::<Result<_, _>>().map(Some)
    }
}

pub fn as_list(loc: Loc, value: Value) -> Result<Vec<Value>, FieldError> {
    match value {
        Value::Array(items) => Ok(items),
        other => Err(FieldError::new("list_type", loc, "Input should be a valid list", &other)),
    }
}

pub fn as_string(loc: &Loc, value: Value) -> Result<String, FieldError> {
    match value {
        Value::String(s) => Ok(s),
        other => Err(FieldError::new("string_type", loc.clone(), "Input should be a valid string", &other)),
    }
}

pub fn as_bool(loc: &Loc, value: &Value) -> Result<bool, FieldError> {
    match value {
        Value::Bool(b) => Ok(*b),
        Value::String(s) if s == "true" => Ok(true),
        Value::String(s) if s == "false" => Ok(false),
        Value::Number(n) if n.as_u64() == Some(1) => Ok(true),
        Value::Number(n) if n.as_u64() == Some(0) => Ok(false),
        other => Err(FieldError::new("bool_type", loc.clone(), "Input should be a valid boolean", other)),
    }
}

pub fn as_integer(loc: &Loc, value: &Value) -> Result<i64, FieldError> {
    let error = |kind, message: &str| Err(FieldError::new(kind, loc.clone(), message, value));
    match value {
        Value::Number(n) => match (n.as_i64(), n.as_f64()) {
            (Some(i), _) => Ok(i),
            (None, Some(f)) if n.is_f64() && f.fract() == 0.0 && f.abs() < 9.0e15 => Ok(f as i64),
            (None, Some(f)) if n.is_f64() && f.fract() != 0.0 => {
                error("int_from_float", "Input should be a valid integer, got a number with a fractional part")
            }
            _ => error("int_parsing_size", "Input should be a valid integer between -2^63 and 2^63 - 1"),
        },
        Value::String(s) => match s.trim().parse() {
            Ok(i) => Ok(i),
            Err(_) => error("int_parsing", "Input should be a valid integer, unable to parse string as an integer"),
        },
        _ => error("int_type", "Input should be a valid integer"),
    }
}

pub fn as_number(loc: &Loc, value: &Value) -> Result<f64, FieldError> {
    let error = |kind, message: &str| Err(FieldError::new(kind, loc.clone(), message, value));
    match value {
        Value::Number(n) => Ok(n.as_f64().unwrap_or(f64::NAN)),
        Value::String(s) => match s.trim().parse::<f64>() {
            Ok(f) if f.is_finite() => Ok(f),
            Ok(_) => error("finite_number", "Input should be a finite number"),
            Err(_) => error("float_parsing", "Input should be a valid number, unable to parse string as a number"),
        },
        _ => error("float_type", "Input should be a valid number"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        Fields::of(Loc::body(), value).unwrap()
    }

    #[test]
    fn refusals_have_the_words_of_vllm() {
        let mut f = fields(json!({"max_tokens": "abc", "messages": "hi"}));
        assert_eq!(
            f.integer("max_tokens").unwrap_err().to_string(),
            "1 validation error:\n  {'type': 'int_parsing', 'loc': 'body.max_tokens', 'msg': 'Input should be a valid \
             integer, unable to parse string as an integer', 'input': 'abc'}"
        );
        assert_eq!(
            f.list("messages").unwrap_err().to_string(),
            "1 validation error:\n  {'type': 'list_type', 'loc': 'body.messages', 'msg': 'Input should be a valid list', \
             'input': 'hi'}"
        );
        assert_eq!(
            f.missing("prompt").to_string(),
            "1 validation error:\n  {'type': 'missing', 'loc': 'body.prompt', 'msg': 'Field required', 'input': '<dict of \
             2 items>'}"
        );
    }

    #[test]
    fn null_is_absent_and_what_nobody_took_is_unknown() {
        let mut f = fields(json!({"a": null, "b": 5.0, "c": "6", "d": [1, "2"], "x": 1}));
        assert_eq!(f.integer("a").unwrap(), None);
        assert_eq!(f.integer("b").unwrap(), Some(5));
        assert_eq!(f.integer("c").unwrap(), Some(6));
        assert_eq!(f.integers("d").unwrap(), Some(vec![1, 2]));
        assert_eq!(f.unknown(), ["x"]);
    }

    #[test]
    fn numbers_that_do_not_fit_are_refused() {
        let mut f = fields(json!({"a": 18446744073709551615u64, "b": 1.5, "c": 1e300, "d": "inf", "e": true}));
        for (name, kind) in [("a", "int_parsing_size"), ("b", "int_from_float"), ("c", "int_parsing_size")] {
            assert_eq!(f.integer(name).unwrap_err().kind, kind);
        }
        assert_eq!(f.number("d").unwrap_err().kind, "finite_number");
        assert_eq!(f.number("e").unwrap_err().kind, "float_type");
    }
}
