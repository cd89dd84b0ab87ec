//! What is asked of and told to the workers about KV memory: reports for `ernie-ctl kv`, swap settings at run time.

use super::{Stage, Supervisor};
use ernie_proto::ids::WorkerId;
use ernie_proto::worker::{KvReport, SwapSettings, ToWorker};
use std::collections::HashSet;
use tokio::sync::oneshot;

/// Questions under way; an operator has one screen.
const ASKS_MAX: usize = 16;

/// One question to all workers.
pub(super) struct KvAsk {
    waiting: HashSet<WorkerId>,
    reports: Vec<(WorkerId, KvReport)>,
    reply: oneshot::Sender<Vec<(WorkerId, KvReport)>>,
}

impl Supervisor {
    pub(super) fn ask_kv(&mut self, reply: oneshot::Sender<Vec<(WorkerId, KvReport)>>) {
        self.kv_asks.retain(|ask| !ask.reply.is_closed());
        if self.kv_asks.len() >= ASKS_MAX {
            return; // the asker sees a closed reply
        }
        let mut waiting = HashSet::new();
        for slot in self.slots.values().filter(|slot| slot.serves()) {
            if let Some(live) = &slot.live {
                slot.send(ToWorker::AskKv);
                waiting.insert(live.id);
            }
        }
        self.kv_asks.push(KvAsk { waiting, reports: Vec::new(), reply });
        self.answer_kv();
    }

    pub(super) fn on_kv(&mut self, worker: WorkerId, report: &KvReport) {
        for ask in &mut self.kv_asks {
            if ask.waiting.remove(&worker) {
                ask.reports.push((worker, report.clone()));
            }
        }
        self.answer_kv();
    }

    /// The worker will not answer any more.
    pub(super) fn kv_lost(&mut self, worker: WorkerId) {
        for ask in &mut self.kv_asks {
            ask.waiting.remove(&worker);
        }
        self.answer_kv();
    }

    fn answer_kv(&mut self) {
        for mut ask in self.kv_asks.extract_if(.., |ask| ask.waiting.is_empty()) {
            ask.reports.sort_by_key(|(worker, _)| *worker);
            // The asker may have gone.
            let _ = ask.reply.send(ask.reports);
        }
    }

    /// For the workers that are there, and for those that come.
    pub(super) fn set_swap(&mut self, settings: SwapSettings) {
        self.swap = Some(settings);
        for slot in self.slots.values() {
            if slot.live.as_ref().is_some_and(|live| matches!(live.stage, Stage::Ready | Stage::Draining)) {
                slot.send(ToWorker::SetSwap(settings));
            }
        }
    }
}
