//! Places from the one unused longest to the newest: a doubly linked list in two arrays, so that nothing is allocated.

/// End of the list.
const NIL: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct EvictionList {
    older: Vec<u32>,
    newer: Vec<u32>,
    member: Vec<bool>,
    oldest: u32,
    newest: u32,
    count: u32,
}

impl EvictionList {
    pub(super) fn new(len: u32) -> Self {
        let len = len as usize;
        Self {
            older: vec![NIL; len],
            newer: vec![NIL; len],
            member: vec![false; len],
            oldest: NIL,
            newest: NIL,
            count: 0,
        }
    }

    pub(super) fn contains(&self, place: u32) -> bool {
        self.member[place as usize]
    }

    pub(super) fn push_newest(&mut self, place: u32) {
        debug_assert!(!self.contains(place));
        self.member[place as usize] = true;
        self.older[place as usize] = self.newest;
        self.newer[place as usize] = NIL;
        match self.newest {
            NIL => self.oldest = place,
            newest => self.newer[newest as usize] = place,
        }
        self.newest = place;
        self.count += 1;
    }

    pub(super) fn remove(&mut self, place: u32) {
        debug_assert!(self.contains(place));
        self.member[place as usize] = false;
        let (older, newer) = (self.older[place as usize], self.newer[place as usize]);
        match older {
            NIL => self.oldest = newer,
            older => self.newer[older as usize] = newer,
        }
        match newer {
            NIL => self.newest = older,
            newer => self.older[newer as usize] = older,
        }
        self.count -= 1;
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NIL).then_some(self.oldest)
    }

    pub(super) fn newer(&self, place: u32) -> Option<u32> {
        let newer = self.newer[place as usize];
        (newer != NIL).then_some(newer)
    }
}
