//! Which swap settings are in force: the configuration, the clock for policy `window`, and the host's memory.

use crate::admin::Control;
use crate::config::{Config, SwapChoice, SwapConfig};
use crate::supervisor::FleetHandle;
use crate::system::memory;
use ernie_proto::worker::{SwapDisk, SwapPolicy, SwapSettings};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// How often clock and memory are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The settings at this moment.
pub(super) fn now(config: &SwapConfig, memory_short: bool) -> SwapSettings {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    effective(config, (seconds / 60 % 1440) as u16, memory_short)
}

fn effective(config: &SwapConfig, minute: u16, memory_short: bool) -> SwapSettings {
    let inside = config.window.is_some_and(|(from, to)| match from < to {
        true => (from..to).contains(&minute),
        false => minute >= from || minute < to,
    });
    let policy = match config.policy {
        _ if memory_short => SwapPolicy::Off,
        SwapChoice::Fixed(policy) => policy,
        SwapChoice::Window if inside => SwapPolicy::Always,
        SwapChoice::Window => SwapPolicy::Off,
    };
    SwapSettings {
        policy,
        restore: config.restore,
        sequence_share: config.sequence_share,
        high_watermark: config.high_watermark,
        low_watermark: config.low_watermark,
    }
}

/// The file tier, if one is wanted.
pub(super) fn disk(config: &Config) -> Option<SwapDisk> {
    let dir = disk_dir(config);
    (config.swap.disk_bytes > 0).then_some(SwapDisk { dir, bytes: config.swap.disk_bytes })
}

fn disk_dir(config: &Config) -> PathBuf {
    config.swap.disk_dir.clone().unwrap_or_else(|| config.paths.state_dir.join("swap"))
}

/// Deletes what workers left: the files outlive a worker, never the daemon. Also after one that was killed, at the next start.
pub(super) fn delete_files(config: &Config) {
    let Ok(entries) = std::fs::read_dir(disk_dir(config)) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if name.starts_with("worker-")
            && name.ends_with(".kv")
            && let Err(error) = std::fs::remove_file(&path)
        {
            tracing::warn!(path = %path.display(), %error, "a swap file could not be deleted");
        }
    }
}

/// Short below the floor, until there is twice as much.
fn is_short(before: bool, available: Option<u64>, floor: u64) -> bool {
    available.is_some_and(|available| available < if before { floor.saturating_mul(2) } else { floor })
}

/// Tells the fleet whenever the answer changes.
pub(super) fn follow(control: &Arc<Control>, fleet: &FleetHandle) {
    let config = control.config();
    let has_space = config.engine.swap_space_bytes > 0 || config.swap.disk_bytes > 0;
    let (sender, mut configured) = watch::channel(config.swap.clone());
    control.follow(move |config| {
        sender.send_replace(config.swap.clone());
    });
    let fleet = fleet.clone();
    tokio::spawn(async move {
        let (mut last, mut short) = (None, false);
        loop {
            let config = configured.borrow_and_update().clone();
            let was_short = short;
            short = is_short(short, memory::available_bytes(), config.memory_floor_bytes);
            if short != was_short && has_space {
                let floor = config.memory_floor_bytes;
                if short {
                    tracing::warn!(floor, "host memory is short: KV is not swapped out until there is more");
                } else {
                    tracing::info!("host memory is back: KV may be swapped out again");
                }
            }
            let settings = now(&config, short);
            if last != Some(settings) {
                if has_space {
                    tracing::info!(policy = ?settings.policy, restore = ?settings.restore, "swap policy in force");
                }
                if fleet.set_swap(settings).await.is_err() {
                    return;
                }
                last = Some(settings);
            }
            tokio::select! {
                changed = configured.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use ernie_proto::worker::SwapRestore;

    #[test]
    fn a_window_opens_and_closes_and_may_lie_over_midnight() {
        let mut config = SwapConfig {
            policy: SwapChoice::Window,
            window: Some((540, 750)),
            restore: SwapRestore::Auto,
            sequence_share: 1.0,
            high_watermark: 0.9,
            low_watermark: 0.8,
            memory_floor_bytes: 100,
            disk_bytes: 0,
            disk_dir: None,
        };
        let at = |config: &SwapConfig, minute| effective(config, minute, false).policy;
        for (minute, policy) in [(539, SwapPolicy::Off), (540, SwapPolicy::Always), (750, SwapPolicy::Off)] {
            assert_eq!(at(&config, minute), policy, "{minute}");
        }
        config.window = Some((1380, 60));
        for (minute, policy) in
            [(1379, SwapPolicy::Off), (1380, SwapPolicy::Always), (59, SwapPolicy::Always), (60, SwapPolicy::Off)]
        {
            assert_eq!(at(&config, minute), policy, "{minute}");
        }
        assert_eq!(effective(&config, 0, true).policy, SwapPolicy::Off, "memory is short");
    }

    #[test]
    fn memory_has_to_recover_well_before_swapping_is_on_again() {
        assert!(is_short(false, Some(99), 100) && !is_short(false, Some(150), 100));
        assert!(is_short(true, Some(150), 100) && !is_short(true, Some(200), 100));
        assert!(!is_short(true, None, 100), "what can not be read is no reason");
    }
}
