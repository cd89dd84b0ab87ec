//! When a choice ends.

use crate::outputs::FinishReason;
use crate::params::{RepetitionDetection, SamplingParams};

/// Why a choice ends with the last of `generated`, if it does. `room` is how many more tokens the model could take.
pub fn finish(params: &SamplingParams, generated: &[u32], room: usize, constrained: bool) -> Option<FinishReason> {
    let &last = generated.last()?;
    if generated.len() >= params.min_tokens as usize {
        // A grammar's end is an end: there is nothing to go on with.
        if (constrained || !params.ignore_eos) && params.eos_token_ids.contains(&last) {
            return Some(FinishReason::Eos);
        }
        if params.stop_token_ids.contains(&last) {
            return Some(FinishReason::StopToken);
        }
    }
    if room == 0 || generated.len() >= params.max_tokens as usize {
        return Some(FinishReason::Length);
    }
    let circles = generated.len() >= params.min_tokens as usize
        && params.repetition_detection.is_some_and(|detection| goes_in_circles(detection, generated));
    circles.then_some(FinishReason::Repetition)
}

/// Whether `generated` ends with some pattern repeated often enough.
fn goes_in_circles(detection: RepetitionDetection, generated: &[u32]) -> bool {
    if detection.min_count < 2 {
        return false;
    }
    (detection.min_pattern.max(1)..=detection.max_pattern).any(|pattern| {
        let pattern = pattern as usize;
        let Some(start) =
            pattern.checked_mul(detection.min_count as usize).and_then(|n| generated.len().checked_sub(n))
        else {
            return false;
        };
        let tail = &generated[start..];
        tail[pattern..] == tail[..tail.len() - pattern]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_apart() {
        let params = SamplingParams {
            eos_token_ids: vec![2],
            stop_token_ids: vec![7],
            max_tokens: 4,
            min_tokens: 2,
            ..SamplingParams::default()
        };
        assert_eq!(finish(&params, &[1], 9, false), None);
        assert_eq!(finish(&params, &[2], 9, false), None, "before min_tokens");
        assert_eq!(finish(&params, &[1, 2], 9, false), Some(FinishReason::Eos));
        assert_eq!(finish(&params, &[1, 7], 9, false), Some(FinishReason::StopToken));
        assert_eq!(finish(&params, &[1, 1, 1, 1], 9, false), Some(FinishReason::Length));
        assert_eq!(finish(&params, &[1], 0, false), Some(FinishReason::Length));
        let params = SamplingParams { ignore_eos: true, ..params };
        assert_eq!(finish(&params, &[1, 2], 9, false), None);
        assert_eq!(finish(&params, &[1, 2], 9, true), Some(FinishReason::Eos));
    }

    #[test]
    fn going_in_circles_is_noticed_at_the_count_asked_for() {
        let detection = RepetitionDetection { min_pattern: 2, max_pattern: 3, min_count: 3 };
        assert!(goes_in_circles(detection, &[9, 1, 2, 1, 2, 1, 2]));
        assert!(!goes_in_circles(detection, &[9, 2, 1, 2, 1, 2]));
        assert!(goes_in_circles(detection, &[1, 2, 3, 1, 2, 3, 1, 2, 3]));
        assert!(!goes_in_circles(detection, &[1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4]));
        assert!(goes_in_circles(detection, &[5; 6]), "one token over and over is a pattern of two as well");
    }
}
