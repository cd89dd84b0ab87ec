//! Tokens to text while they come: whole characters only.
//!
//! Every token of the tokenizers served here stands for fixed bytes (`tokenizer::Tokenizer::bytes`), so decoding is joining
//! bytes and cutting at character boundaries; nothing is decoded twice and a token costs its own length. A character that is
//! not complete yet is held back (three bytes at most); bytes that can never become a character turn into U+FFFD as
//! `String::from_utf8_lossy` does it. A character still incomplete when the answer ends is dropped: it is cut, not invalid.

use super::tokenizer::Tokenizer;

/// Joins bytes into characters.
#[derive(Debug, Clone, Default)]
pub struct CharacterAssembler {
    pending: Vec<u8>,
}

impl CharacterAssembler {
    /// Takes the next bytes; appends all characters that are complete to `out`.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        if self.pending.is_empty()
            && let Ok(text) = std::str::from_utf8(bytes)
        {
            out.push_str(text);
            return;
        }
        self.pending.extend_from_slice(bytes);
        let mut from = 0;
        loop {
            match std::str::from_utf8(&self.pending[from..]) {
                Ok(text) => {
                    out.push_str(text);
                    from = self.pending.len();
                    break;
                }
                Err(e) => {
                    let valid = from + e.valid_up_to();
                    out.push_str(std::str::from_utf8(&self.pending[from..valid]).unwrap_or_default());
                    from = valid;
                    match e.error_len() {
                        Some(n) => {
                            out.push('\u{FFFD}');
                            from += n;
                        }
                        None => break,
                    }
                }
            }
        }
        self.pending.drain(..from);
    }

    /// Bytes of a character that is not complete yet.
    pub fn pending(&self) -> &[u8] {
        &self.pending
    }
}

/// Turns the tokens of one choice into text.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    characters: CharacterAssembler,
    skip_special_tokens: bool,
}

impl Detokenizer {
    /// `skip_special_tokens`: control tokens (and what ends a turn) give no text.
    pub fn new(skip_special_tokens: bool) -> Self {
        Self { characters: CharacterAssembler::default(), skip_special_tokens }
    }

    /// Takes the next token; appends the characters it completes to `out`. Ids without a token give nothing.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        if self.skip_special_tokens && tokenizer.is_special(id) {
            return;
        }
        self.characters.push(tokenizer.bytes(id), out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn assemble<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (String, usize) {
        let mut a = CharacterAssembler::default();
        let mut out = String::new();
        for piece in pieces {
            a.push(piece, &mut out);
        }
        (out, a.pending().len())
    }

    #[test]
    fn bytes_one_by_one_give_whole_characters() {
        for text in ["龘", "👨‍👩‍👧", "北京", "a龘b", "\u{FFFD}"] {
            let mut a = CharacterAssembler::default();
            let mut out = String::new();
            for b in text.bytes() {
                let before = out.clone();
                a.push(&[b], &mut out);
                assert!(text.starts_with(&out), "{before:?} -> {out:?}");
            }
            assert_eq!(out, text);
        }
    }

    #[test]
    fn an_incomplete_end_is_dropped_and_invalid_bytes_are_marked() {
        assert_eq!(assemble([&"北京".as_bytes()[..5]]), ("北".into(), 2));
        assert_eq!(assemble([&b"a\xffb"[..]]), ("a\u{FFFD}b".into(), 0));
        assert_eq!(assemble([&b"\xe5\x8c"[..], &b"x"[..]]), ("\u{FFFD}x".into(), 0));
    }

    proptest! {
        #[test]
        fn any_cut_of_any_text_gives_the_text(text in "\\PC{0,40}", cuts in proptest::collection::vec(0usize..200, 0..20)) {
            let bytes = text.as_bytes();
            let mut bounds: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).collect();
            bounds.extend([0, bytes.len()]);
            bounds.sort_unstable();
            let (out, pending) = assemble(bounds.windows(2).map(|w| &bytes[w[0]..w[1]]));
            prop_assert_eq!(out, text.as_str());
            prop_assert_eq!(pending, 0);
        }

        #[test]
        fn any_cut_of_any_bytes_is_what_lossy_decoding_gives(
            bytes in proptest::collection::vec(any::<u8>(), 0..60),
            cuts in proptest::collection::vec(0usize..60, 0..20),
        ) {
            let mut bounds: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).collect();
            bounds.extend([0, bytes.len()]);
            bounds.sort_unstable();
            let (out, pending) = assemble(bounds.windows(2).map(|w| &bytes[w[0]..w[1]]));
            prop_assert!(pending <= 3, "never more than a character is held back");
            let whole = String::from_utf8_lossy(&bytes[..bytes.len() - pending]);
            prop_assert_eq!(out, whole.as_ref());
        }
    }
}
