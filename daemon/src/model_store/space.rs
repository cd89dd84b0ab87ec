//! Whether two models fit into memory at the same time. Decides; measures nothing.

/// Memory during a rollout, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// What all workers may use together (cgroup or machine, times the configured fraction).
    pub limit: u64,
    /// What the serving deployment was measured to take: weights, workspace and KV blocks of all its workers.
    pub serving: u64,
    /// Weights of the candidate as they will lie in memory, all workers together.
    pub weights: u64,
    /// Workspace of the candidate, all workers together.
    pub workspace: u64,
    /// The least KV memory that makes it useful, all workers together.
    pub kv_least: u64,
    /// KV memory that it would like.
    pub kv_wanted: u64,
}

/// How the candidate is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Beside the serving one; the candidate's workers may take this much together.
    SideBySide { candidate: u64 },
    /// In the place of the serving one.
    StopFirst { candidate: u64 },
}

/// The candidate does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the model takes at least {} MiB ({} MiB weights), but {} MiB are there{}; quantise it, lower the KV memory, or give \
     more memory",
    mib(*.needed), mib(*.weights), mib(*.room), if *.beside { " beside the serving model; --strategy stop-first needs less" } else { "" }
)]
pub struct NoRoom {
    pub needed: u64,
    pub weights: u64,
    pub room: u64,
    pub beside: bool,
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// `beside`: `Some(true)` only beside, `Some(false)` only in place, `None` as it fits.
pub fn place(space: &Space, beside: Option<bool>) -> Result<Placement, NoRoom> {
    let least = space.weights + space.workspace + space.kv_least;
    let wanted = (space.weights + space.workspace + space.kv_wanted).max(least);
    let left = space.limit.saturating_sub(space.serving);
    let no_room = |room, beside| NoRoom { needed: least, weights: space.weights, room, beside };
    match beside {
        Some(true) | None if left >= least => Ok(Placement::SideBySide { candidate: wanted.min(left) }),
        Some(true) => Err(no_room(left, true)),
        _ if space.limit >= least => Ok(Placement::StopFirst { candidate: wanted.min(space.limit) }),
        _ => Err(no_room(space.limit, false)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(limit: u64, serving: u64) -> Space {
        Space { limit, serving, weights: 30, workspace: 5, kv_least: 5, kv_wanted: 25 }
    }

    #[test]
    fn two_models_go_side_by_side_when_both_fit() {
        assert_eq!(place(&space(120, 60), None), Ok(Placement::SideBySide { candidate: 60 }));
        assert_eq!(place(&space(105, 60), None), Ok(Placement::SideBySide { candidate: 45 }), "with less KV memory");
        assert_eq!(place(&space(99, 60), None), Ok(Placement::StopFirst { candidate: 60 }));
        assert_eq!(place(&space(50, 60), None), Ok(Placement::StopFirst { candidate: 50 }));
    }

    #[test]
    fn what_was_asked_for_is_done_or_refused_with_the_figures() {
        assert_eq!(place(&space(120, 60), Some(false)), Ok(Placement::StopFirst { candidate: 60 }));
        let refused = place(&space(99, 60), Some(true)).expect_err("no room beside");
        assert_eq!((refused.needed, refused.room, refused.beside), (40, 39, true));
        let refused = place(&space(39, 0), None).expect_err("no room at all");
        assert!(refused.to_string().contains("more memory") && !refused.beside);
    }
}
