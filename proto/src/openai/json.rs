//! Request bodies to JSON values, strictly: valid UTF-8, no duplicate members, bounded depth and number of values.
//!
//! `serde_json` itself refuses what JSON has not (NaN, 1e400, lone surrogates, trailing text, more than 128 levels).

use super::fields::{FieldError, Loc};
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::cell::Cell;
use std::fmt;

/// Values per body, members and elements counted: a value takes 30 bytes or more while its text may take two.
pub const VALUES_MAX: usize = 1_000_000;

/// Reads one body that has to be an object.
pub fn parse_object(body: &[u8]) -> Result<Map<String, Value>, FieldError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Err(FieldError::new("missing", Loc::body(), "Field required", &Value::Null));
    }
    match parse(body)? {
        Value::Object(members) => Ok(members),
        other => Err(FieldError::new(
            "model_attributes_type",
            Loc::body(),
            "Input should be a valid dictionary or object to extract fields from",
            &other,
        )),
    }
}

/// Reads one JSON document.
pub fn parse(body: &[u8]) -> Result<Value, FieldError> {
    let left = Cell::new(VALUES_MAX);
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let value = Strict { left: &left }.deserialize(&mut deserializer);
    value.and_then(|v| deserializer.end().map(|()| v)).map_err(|e| {
        let offset = offset(body, e.line(), e.column());
        // serde_json adds the position, which `loc` already says.
        let text = e.to_string();
        let cause = text.rsplit_once(" at line ").map_or(text.as_str(), |(cause, _)| cause);
        FieldError::json(offset, cause)
    })
}

fn offset(body: &[u8], line: usize, column: usize) -> usize {
    let before: usize = body.split(|&b| b == b'\n').take(line.saturating_sub(1)).map(|l| l.len() + 1).sum();
    (before + column).min(body.len())
}

#[derive(Clone, Copy)]
struct Strict<'c> {
    left: &'c Cell<usize>,
}

impl Strict<'_> {
    fn count<E: Error>(self) -> Result<(), E> {
        match self.left.get().checked_sub(1) {
            Some(left) => {
                self.left.set(left);
                Ok(())
            }
            None => Err(E::custom(format_args!("more than {VALUES_MAX} values"))),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.count()?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_f64<E: Error>(self, v: f64) -> Result<Value, E> {
        Number::from_f64(v).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::String(v.to_owned()))
    }

    fn visit_string<E>(self, v: String) -> Result<Value, E> {
        Ok(Value::String(v))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(self)? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut members = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            if members.contains_key(&name) {
                return Err(A::Error::custom(format_args!("duplicate member `{name}`")));
            }
            let value = map.next_value_seed(self)?;
            members.insert(name, value);
        }
        Ok(Value::Object(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cause(body: &[u8]) -> String {
        parse_object(body).unwrap_err().to_string()
    }

    #[test]
    fn what_is_not_json_is_refused_with_the_place() {
        for (body, place) in [
            (&b"{\"model\": \"ernie-0.3b\", \"prompt\": "[..], "body.34"),
            (b"{\"a\": NaN}", "body.7"),
            (b"{\"a\": 1e400}", "body.1"),
            (b"{\"a\": \"\\ud800\"}", "body.1"),
            (b"\xef\xbb\xbf{}", "body."),
            (b"{\"a\": \"\xff\"}", "body."),
            (b"{} {}", "body.4"),
            (b"{\"a\": 1, \"a\": 2}", "body."),
        ] {
            let text = cause(body);
            assert!(text.contains("json_invalid"), "{text}");
            assert!(text.contains(&format!("'loc': '{place}")), "{:?}: {text}", String::from_utf8_lossy(body));
        }
        assert!(cause(b"{\"a\": 1, \"a\": 2}").contains("duplicate member `a`"));
    }

    #[test]
    fn depth_and_number_of_values_are_bounded() {
        let deep = format!("{{\"a\": {}1{}}}", "[".repeat(10_000), "]".repeat(10_000));
        assert!(cause(deep.as_bytes()).contains("recursion limit"), "{}", cause(deep.as_bytes()));
        let many = format!("{{\"a\": [{}1]}}", "1,".repeat(VALUES_MAX));
        assert!(cause(many.as_bytes()).contains("more than 1000000 values"));
    }

    #[test]
    fn only_an_object_is_a_request() {
        assert!(cause(b"[1,2]").contains("'loc': 'body', 'msg': 'Input should be a valid dictionary"));
        assert!(cause(b"").contains("'type': 'missing', 'loc': 'body'"));
        assert!(cause(b" \n").contains("missing"));
    }

    #[test]
    fn order_and_numbers_are_kept() {
        let v = parse(b"{\"b\": 18446744073709551615, \"a\": -1, \"c\": 1.5}").unwrap();
        assert_eq!(v.to_string(), "{\"b\":18446744073709551615,\"a\":-1,\"c\":1.5}");
    }
}
