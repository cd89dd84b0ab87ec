//! Values from text: sizes, durations, fractions, modes. Each answers with what it expected, in words.

use std::time::Duration;

/// What was wrong with a value: what is expected, and if known how to write it.
pub type Expected = String;

pub fn boolean(text: &str) -> Result<bool, Expected> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "1" => Ok(true),
        "false" | "no" | "off" | "0" => Ok(false),
        _ => Err("expected true or false".to_owned()),
    }
}

/// A whole number in a range.
pub fn integer(text: &str, low: u64, high: u64) -> Result<u64, Expected> {
    let expected = || {
        if high == u64::MAX {
            format!("expected a whole number from {low} up")
        } else {
            format!("expected a whole number from {low} to {high}")
        }
    };
    let number: u64 = text.replace('_', "").parse().map_err(|_| expected())?;
    if (low..=high).contains(&number) { Ok(number) } else { Err(expected()) }
}

pub fn fraction(text: &str) -> Result<f32, Expected> {
    match text.parse::<f32>() {
        Ok(f) if f > 0.0 && f <= 1.0 => Ok(f),
        _ => Err("expected a fraction above 0 and up to 1, such as 0.9".to_owned()),
    }
}

/// A difference between two shares.
pub fn share(text: &str) -> Result<f64, Expected> {
    match text.parse::<f64>() {
        Ok(f) if (0.0..=1.0).contains(&f) => Ok(f),
        _ => Err("expected a share from 0 to 1, such as 0.05 (1 switches the rule off)".to_owned()),
    }
}

/// How many times as much.
pub fn times(text: &str) -> Result<f64, Expected> {
    match text.parse::<f64>() {
        Ok(f) if f >= 1.0 && f.is_finite() => Ok(f),
        _ => Err("expected a number from 1 up, such as 3 or 2.5".to_owned()),
    }
}

const UNITS: &[(&str, u64)] = &[
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("b", 1),
];

/// Bytes: `64MiB`, `1.5G`, `4096`. A bare number has the unit `bare`.
pub fn size(text: &str, bare: u64) -> Result<u64, Expected> {
    let expected = || "expected a size such as 512MiB, 4GiB or a number".to_owned();
    let lower = text.trim().to_ascii_lowercase();
    let (digits, unit) = UNITS
        .iter()
        .find_map(|&(u, factor)| lower.strip_suffix(u).map(|d| (d.trim(), factor)))
        .unwrap_or((&lower, bare));
    let number: f64 = digits.parse().map_err(|_| expected())?;
    let bytes = number * unit as f64;
    // 2^63: beyond it the cast would saturate silently.
    if bytes.is_finite() && (0.0..9.2e18).contains(&bytes) { Ok(bytes as u64) } else { Err(expected()) }
}

/// `500ms`, `30s`, `5m`, `2h`, `7d`; a bare number is seconds.
pub fn duration(text: &str) -> Result<Duration, Expected> {
    let expected = || "expected a duration such as 500ms, 30s, 5m, 2h or 7d".to_owned();
    let text = text.trim();
    let (digits, seconds) = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86_400.0), ("", 1.0)]
        .iter()
        .find_map(|&(unit, factor)| {
            text.strip_suffix(unit).filter(|d| d.ends_with(|c: char| c.is_ascii_digit())).map(|d| (d, factor))
        })
        .ok_or_else(expected)?;
    let number: f64 = digits.trim().parse().map_err(|_| expected())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| expected())
}

/// `09:00-12:30` as minutes of the day.
pub fn window(text: &str) -> Result<(u16, u16), Expected> {
    let minutes = |t: &str| {
        let (hours, minutes) = t.trim().split_once(':')?;
        let (hours, minutes): (u16, u16) = (hours.parse().ok()?, minutes.parse().ok()?);
        (hours < 24 && minutes < 60).then_some(hours * 60 + minutes)
    };
    let (from, to) = text.split_once('-').unwrap_or_default();
    match (minutes(from), minutes(to)) {
        (Some(from), Some(to)) if from != to => Ok((from, to)),
        _ => Err("expected two times of the day in UTC such as 09:00-12:30".to_owned()),
    }
}

/// File permissions in octal.
pub fn mode(text: &str) -> Result<u32, Expected> {
    match text {
        "0600" | "600" | "0o600" => Ok(0o600),
        "0660" | "660" | "0o660" => Ok(0o660),
        _ => Err("expected 0600 (owner) or 0660 (owner and group)".to_owned()),
    }
}

/// A log level or directives; only checked here.
pub fn level(text: &str) -> Result<(), Expected> {
    tracing_subscriber::filter::EnvFilter::builder().parse(text).map(|_| ()).map_err(|e| {
        format!("expected error, warn, info, debug, trace, or directives such as info,ernied::http=debug ({e})")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        for (text, bytes) in
            [("64MiB", 64 << 20), ("1.5g", 3 << 29), ("4096", 4096), ("2 GB", 2_000_000_000), ("0", 0), ("7b", 7)]
        {
            assert_eq!(size(text, 1), Ok(bytes), "{text}");
        }
        assert_eq!(size("4", 1 << 30), Ok(4 << 30), "a bare swap space is GiB");
        for text in ["", "much", "-1", "1e300", "MiB", "nan"] {
            assert!(size(text, 1).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_read_as_people_write_them() {
        for (text, ms) in
            [("500ms", 500), ("30s", 30_000), ("30", 30_000), ("1.5m", 90_000), ("2h", 7_200_000), ("7d", 604_800_000)]
        {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "s", "soon", "-3s", "3w", "1e400"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn whole_numbers_name_their_range() {
        assert_eq!(integer("1_000", 1, 5000), Ok(1000));
        assert_eq!(integer("0", 1, 65535), Err("expected a whole number from 1 to 65535".to_owned()));
        assert_eq!(integer("x", 1, u64::MAX), Err("expected a whole number from 1 up".to_owned()));
    }
}
