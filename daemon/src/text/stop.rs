//! Stop strings: where an answer ends, and how much of its text may be shown before that is certain.
//!
//! The watcher is fed text in pieces of any size and gives back what can be shown. Text that may be the beginning of a stop
//! string is held back until it is known not to be one. Its verdict does not depend on how the text was cut: the stop string
//! that is *complete first* wins, and of two that are complete at the same character the longer one.
//!
//! Not here: stop token ids (the engine ends a choice on them) and the turning of tokens into text (`detokenizer`).

/// What a piece of text led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stopped {
    /// Index into the stop strings.
    pub which: usize,
}

/// Watches one choice for its stop strings.
#[derive(Debug, Clone)]
pub struct StopWatcher {
    stops: Vec<String>,
    include_stop: bool,
    /// Not yet shown: the longest end of the text so far that begins a stop string.
    held: String,
    stopped: bool,
}

impl StopWatcher {
    /// `include_stop`: the stop string itself is shown as the last of the text. Empty stop strings are ignored.
    pub fn new(stops: Vec<String>, include_stop: bool) -> Self {
        Self {
            stops: stops.into_iter().filter(|s| !s.is_empty()).collect(),
            include_stop,
            held: String::new(),
            stopped: false,
        }
    }

    /// The stop strings that are watched for; [`Stopped::which`] counts in these.
    pub fn stops(&self) -> &[String] {
        &self.stops
    }

    /// Takes the next piece; appends what may be shown to `out`. After a stop nothing more is taken.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<Stopped> {
        if self.stopped {
            return None;
        }
        if self.stops.is_empty() {
            out.push_str(text);
            return None;
        }
        self.held.push_str(text);
        if let Some((which, start, end)) = self.first_complete() {
            out.push_str(&self.held[..if self.include_stop { end } else { start }]);
            self.held.clear();
            self.stopped = true;
            return Some(Stopped { which });
        }
        let keep = self.longest_beginning();
        let show = self.held.len() - keep;
        out.push_str(&self.held[..show]);
        self.held.drain(..show);
        None
    }

    /// Text that no stop may touch (before `min_tokens`): shown at once, never part of a match.
    pub fn pass(&mut self, text: &str, out: &mut String) {
        if self.stopped {
            return;
        }
        out.push_str(&self.held);
        self.held.clear();
        out.push_str(text);
    }

    /// The answer ended for another reason: what was held back is text after all.
    pub fn finish(&mut self, out: &mut String) {
        if !self.stopped {
            out.push_str(&self.held);
        }
        self.held.clear();
    }

    /// The match that is complete first (lowest end, then lowest start), as (which, start, end).
    fn first_complete(&self) -> Option<(usize, usize, usize)> {
        let mut best: Option<(usize, usize, usize)> = None;
        for (which, stop) in self.stops.iter().enumerate() {
            if let Some(start) = self.held.find(stop.as_str()) {
                let end = start + stop.len();
                if best.is_none_or(|(_, s, e)| (end, start) < (e, s)) {
                    best = Some((which, start, end));
                }
            }
        }
        best
    }

    /// Length of the longest end of `held` that is a proper beginning of a stop string.
    fn longest_beginning(&self) -> usize {
        let held = self.held.as_bytes();
        let mut longest = 0;
        for stop in &self.stops {
            let stop = stop.as_bytes();
            let most = (stop.len() - 1).min(held.len());
            // Both are UTF-8, and `stop` begins on a character boundary, so an equal end of `held` begins on one as well.
            if let Some(n) = (longest + 1..=most).rev().find(|&n| held[held.len() - n..] == stop[..n]) {
                // An end that stops inside a character of `stop` is possible in bytes only, and `held` ends on a boundary.
                longest = n;
            }
        }
        longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], include: bool, pieces: &[&str]) -> (String, Option<usize>) {
        let mut watcher = StopWatcher::new(stops.iter().map(|s| s.to_string()).collect(), include);
        let mut out = String::new();
        for piece in pieces {
            if let Some(stopped) = watcher.push(piece, &mut out) {
                return (out, Some(stopped.which));
            }
        }
        watcher.finish(&mut out);
        (out, None)
    }

    #[test]
    fn a_stop_string_split_over_pieces_is_found_and_never_shown() {
        assert_eq!(run(&["</end>"], false, &["hello <", "/e", "nd", "> more"]), ("hello ".into(), Some(0)));
        assert_eq!(run(&["</end>"], true, &["hello <", "/e", "nd", "> more"]), ("hello </end>".into(), Some(0)));
    }

    #[test]
    fn a_beginning_that_turns_out_otherwise_is_shown() {
        assert_eq!(run(&["\n\n"], false, &["a\n", "b\n", "c"]), ("a\nb\nc".into(), None));
        assert_eq!(run(&["北京市"], false, &["去北", "京", "吧"]), ("去北京吧".into(), None));
    }

    #[test]
    fn what_is_held_back_at_the_end_is_text() {
        assert_eq!(run(&["STOP"], false, &["a STO"]), ("a STO".into(), None));
    }

    #[test]
    fn the_stop_complete_first_wins_whatever_the_cut() {
        for pieces in [&["abcd"][..], &["a", "b", "c", "d"], &["ab", "cd"]] {
            assert_eq!(run(&["abcd", "bc"], false, pieces), ("a".into(), Some(1)));
        }
        assert_eq!(run(&["c", "abc"], false, &["abc"]), ("".into(), Some(1)));
    }

    #[test]
    fn text_before_min_tokens_is_not_matched() {
        let mut watcher = StopWatcher::new(vec!["ab".into()], false);
        let mut out = String::new();
        watcher.pass("ab a", &mut out);
        assert_eq!(watcher.push("b", &mut out), None, "the a was passed, it can not begin a match");
        assert_eq!(watcher.push(" ab", &mut out), Some(Stopped { which: 0 }));
        assert_eq!(out, "ab ab ");
    }

    proptest! {
        /// The oracle walks character by character; any cut must say the same.
        #[test]
        fn any_cut_of_any_text_stops_at_the_same_place(
            text in "[ab京😀]{0,24}",
            stops in proptest::collection::vec("[ab京😀]{1,4}", 0..4),
            cuts in proptest::collection::vec(0usize..25, 0..8),
            include in any::<bool>(),
        ) {
            let chars: Vec<char> = text.chars().collect();
            let mut seen = String::new();
            let mut expected = None;
            for c in &chars {
                seen.push(*c);
                if let Some(stop) = stops.iter().filter(|s| seen.ends_with(s.as_str())).max_by_key(|s| s.len()) {
                    expected = Some((seen[..seen.len() - if include { 0 } else { stop.len() }].to_string(), stop.clone()));
                    break;
                }
            }
            let mut bounds: Vec<usize> = cuts.into_iter().map(|c| c.min(chars.len())).collect();
            bounds.extend([0, chars.len()]);
            bounds.sort_unstable();
            let pieces: Vec<String> = bounds.windows(2).map(|w| chars[w[0]..w[1]].iter().collect()).collect();
            let mut watcher = StopWatcher::new(stops.clone(), include);
            let mut out = String::new();
            let mut hit = None;
            for piece in &pieces {
                hit = watcher.push(piece, &mut out).map(|s| stops[s.which].clone());
                if hit.is_some() { break; }
                // Nothing shown so far may have to be taken back.
                prop_assert!(text.starts_with(&out));
            }
            watcher.finish(&mut out);
            match expected {
                Some((shown, stop)) => { prop_assert_eq!(out, shown); prop_assert_eq!(hit, Some(stop)); }
                None => { prop_assert_eq!(out, text); prop_assert_eq!(hit, None); }
            }
        }
    }
}
