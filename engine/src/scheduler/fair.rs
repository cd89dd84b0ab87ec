//! Fair share between owners (API keys): whose turn it is, counted in tokens.
//!
//! Start-time fair queueing. Every request gets a tag when it arrives: the virtual time at which its owner is due again, after
//! all that he has asked for before. Lower tags go first, so 500 prompts of one owner stand in line one after the other while
//! another owner's first one stands beside the first of them. A tag never changes, so the order of sequences stays total and
//! what `preempt` promises holds. What a request did not use of its estimate is given back to its owner's next ones.
//!
//! Classes of priority do not mix: each has a virtual time of its own, and forgets its debts when it is empty.

use std::collections::HashMap;

/// Owners that are not active and in debt, kept per class; beyond it their debts are forgotten.
const IDLE_OWNERS_MAX: usize = 4096;

#[derive(Debug, Default)]
pub struct FairShare {
    classes: HashMap<i32, Class>,
}

#[derive(Debug, Default)]
struct Class {
    /// The tag of the first in line, as far as it has come; never goes back.
    virtual_time: u64,
    owners: HashMap<u64, Owner>,
    /// Requests that have not left.
    active: usize,
}

#[derive(Debug, Default)]
struct Owner {
    /// Tag of his next request, if that is not in the past by then.
    due: u64,
    active: usize,
}

/// What a request was charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fare {
    pub class: i32,
    pub owner: u64,
    pub charged: u64,
}

impl FairShare {
    /// A request comes; its tag.
    pub fn arrive(&mut self, fare: Fare) -> u64 {
        let class = self.classes.entry(fare.class).or_default();
        class.active += 1;
        let owner = class.owners.entry(fare.owner).or_default();
        owner.active += 1;
        let tag = owner.due.max(class.virtual_time);
        owner.due = tag.saturating_add(fare.charged);
        tag
    }

    /// A request leaves, having used this many tokens.
    pub fn leave(&mut self, fare: Fare, used: u64) {
        let Some(class) = self.classes.get_mut(&fare.class) else { return };
        class.active = class.active.saturating_sub(1);
        if class.active == 0 {
            self.classes.remove(&fare.class);
            return;
        }
        if let Some(owner) = class.owners.get_mut(&fare.owner) {
            owner.active = owner.active.saturating_sub(1);
            owner.due = owner.due.saturating_add(used).saturating_sub(fare.charged);
        }
        let now = class.virtual_time;
        class.owners.retain(|_, owner| owner.active > 0 || owner.due > now);
        if class.owners.len() > class.active + IDLE_OWNERS_MAX {
            class.owners.retain(|_, owner| owner.active > 0);
        }
    }

    /// The first in line of a class has this tag now.
    pub fn reached(&mut self, class: i32, tag: u64) {
        if let Some(class) = self.classes.get_mut(&class) {
            class.virtual_time = class.virtual_time.max(tag);
        }
    }

    /// Where the line of a class has come to.
    pub fn now(&self, class: i32) -> u64 {
        self.classes.get(&class).map_or(0, |class| class.virtual_time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fare(owner: u64) -> Fare {
        Fare { class: 0, owner, charged: 100 }
    }

    #[test]
    fn a_newcomer_stands_beside_the_first_in_line_however_long_the_line_is() {
        let mut fair = FairShare::default();
        let greedy: Vec<u64> = (0..500).map(|_| fair.arrive(fare(1))).collect();
        assert_eq!((greedy[0], greedy[499]), (0, 49_900));
        fair.reached(0, greedy[7]);
        assert_eq!(fair.arrive(fare(2)), 700);
        assert_eq!(fair.arrive(fare(2)), 800, "his second one waits as long as one of the other's");
    }

    #[test]
    fn having_been_away_earns_no_credit_and_what_was_not_used_comes_back() {
        let mut fair = FairShare::default();
        fair.arrive(fare(1));
        fair.arrive(fare(2));
        fair.reached(0, 5_000);
        assert_eq!(fair.arrive(fare(2)), 5_000);
        fair.leave(fare(2), 30);
        assert_eq!(fair.arrive(fare(2)), 5_030);
    }

    #[test]
    fn classes_do_not_mix_and_an_empty_one_is_forgotten() {
        let mut fair = FairShare::default();
        fair.arrive(Fare { class: 9, owner: 1, charged: 1 << 40 });
        assert_eq!(fair.arrive(fare(1)), 0);
        fair.leave(fare(1), 100);
        fair.leave(Fare { class: 9, owner: 1, charged: 1 << 40 }, 5);
        assert!(fair.classes.is_empty());
    }
}
