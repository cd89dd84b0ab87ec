//! The hash chain: what a row's hash covers, and the check of a whole chain. Pure.

use sha2::{Digest, Sha256};

/// `prev` of the very first row.
pub(super) const GENESIS: [u8; 32] = [0; 32];

/// A row without its place in the chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) seq: i64,
    pub(super) at_ms: i64,
    pub(super) kind: String,
    pub(super) actor: String,
    pub(super) role: String,
    pub(super) act: String,
    pub(super) subject: String,
    pub(super) intent: Option<i64>,
    pub(super) outcome: Option<String>,
    pub(super) duration_ms: Option<i64>,
    pub(super) detail: String,
    pub(super) version: String,
}

/// SHA-256 over the previous hash and every field. Each field goes in with its length, an absent one differs from an empty
/// one, so that no two rows have the same bytes.
pub(super) fn hash(row: &Row, prev: &[u8]) -> [u8; 32] {
    let mut h = Sha256::new();
    h.update(b"ernied audit row 1\n");
    let mut bytes = |b: &[u8]| {
        h.update((b.len() as u64).to_le_bytes());
        h.update(b);
    };
    bytes(prev);
    bytes(&row.seq.to_le_bytes());
    bytes(&row.at_ms.to_le_bytes());
    for text in [&row.kind, &row.actor, &row.role, &row.act, &row.subject, &row.detail, &row.version] {
        bytes(text.as_bytes());
    }
    bytes(&row.intent.map_or(Vec::new(), |i| i.to_le_bytes().to_vec()));
    bytes(row.outcome.as_ref().map_or(&[], |o| o.as_bytes()));
    bytes(&row.duration_ms.map_or(Vec::new(), |d| d.to_le_bytes().to_vec()));
    h.finalize().into()
}

/// A row as it lies in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Linked {
    pub(super) row: Row,
    pub(super) prev: Vec<u8>,
    pub(super) hash: Vec<u8>,
}

/// What the check found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    pub rows: i64,
    pub first: Option<i64>,
    pub last: Option<i64>,
    /// The first row that does not fit, and why.
    pub broken: Option<(i64, String)>,
}

/// Takes rows in the order of their numbers.
#[derive(Debug, Default)]
pub(super) struct Checker {
    verdict: Verdict,
    last: Option<(i64, Vec<u8>)>,
    /// What the first row hangs on, if rows before it were pruned: answered for by a checkpoint.
    needs_checkpoint: Option<(i64, Vec<u8>)>,
    checkpoints: Vec<(i64, Vec<u8>)>,
}

impl Checker {
    pub(super) fn take(&mut self, linked: &Linked) {
        let seq = linked.row.seq;
        self.verdict.rows += 1;
        self.verdict.first.get_or_insert(seq);
        self.verdict.last = Some(seq);
        if self.verdict.broken.is_some() {
            return;
        }
        match &self.last {
            None if seq == 1 => {
                if linked.prev != GENESIS {
                    return self.break_at(seq, "the first row does not begin the chain");
                }
            }
            None => self.needs_checkpoint = Some((seq - 1, linked.prev.clone())),
            Some((before, _)) if seq != before + 1 => {
                let missing = before + 1;
                return self.break_at(missing, &format!("rows {missing} to {} are missing", seq - 1));
            }
            Some((_, hash)) if *hash != linked.prev => {
                return self
                    .break_at(seq, "it does not hang on the row before it: one of the two was changed or moved");
            }
            Some(_) => {}
        }
        if hash(&linked.row, &linked.prev).as_slice() != linked.hash {
            return self.break_at(seq, "its content does not have its hash: it was changed");
        }
        if linked.row.kind == "checkpoint"
            && let Some(checkpoint) = parse_checkpoint(&linked.row.detail)
        {
            self.checkpoints.push(checkpoint);
        }
        self.last = Some((seq, linked.hash.clone()));
    }

    /// `head` is the last row's number and hash as noted apart.
    pub(super) fn finish(mut self, head: Option<(i64, Vec<u8>)>) -> Verdict {
        if self.verdict.broken.is_none()
            && let Some(need) = self.needs_checkpoint.take()
            && !self.checkpoints.contains(&need)
        {
            let message = "rows before it are missing, and no checkpoint answers for them";
            self.break_at(need.0, message);
        }
        if self.verdict.broken.is_none() && self.last != head {
            let (at, message) = match (&self.last, &head) {
                (Some((last, _)), Some((noted, _))) if noted > last => (last + 1, "rows at the end are missing"),
                (Some((last, _)), Some((noted, _))) if noted < last => (noted + 1, "rows were added from outside"),
                (Some((last, _)), _) => (*last, "it is not the row that was written last"),
                (None, Some((noted, _))) => (*noted, "all rows are missing"),
                (None, None) => return self.verdict,
            };
            self.break_at(at, message);
        }
        self.verdict
    }

    fn break_at(&mut self, seq: i64, message: &str) {
        self.verdict.broken = Some((seq, message.to_owned()));
    }
}

/// `{"through": seq, "hash": hex, ...}`.
fn parse_checkpoint(detail: &str) -> Option<(i64, Vec<u8>)> {
    let value: serde_json::Value = serde_json::from_str(detail).ok()?;
    let hex = value["hash"].as_str()?;
    let bytes =
        (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(hex.get(i..i + 2)?, 16).ok()).collect::<Option<_>>()?;
    Some((value["through"].as_i64()?, bytes))
}
