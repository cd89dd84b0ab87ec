//! The pool: a few threads that spin between the operations of a step and park when nothing comes.
//!
//! One parallel section costs well under a microsecond to start while the workers spin, which 150 sections a step need.
//! Jobs are taken from a counter, in ascending order; the caller works too and never waits for a worker that has not
//! taken a job, so a preempted or parked worker delays nobody. Nothing is allocated after `new`.

use std::cell::UnsafeCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a worker spins without work outside a step before it parks.
const SPIN_IDLE: Duration = Duration::from_millis(2);
/// The same inside a step: bounds what a caller that forgets `step_end` can burn.
const SPIN_IN_STEP: Duration = Duration::from_millis(50);
/// With more threads than cores spinning starves the ones that work.
const SPIN_OVERSUBSCRIBED: Duration = Duration::from_micros(20);
/// The caller gives its core away in between when it has waited this long for the last jobs.
const WAIT_BEFORE_YIELD: Duration = Duration::from_micros(200);
/// Spins between two looks at the clock.
const SPINS_PER_LOOK: u32 = 128;

type Job = dyn Fn(usize, usize) + Sync;

/// Threads for kernels. See the module's text.
pub struct Pool {
    shared: Arc<Shared>,
    /// Only one section runs at a time.
    caller: Mutex<()>,
    workers: Vec<(Thread, Option<JoinHandle<()>>)>,
}

struct Shared {
    /// Jobs of the current section that nobody has taken. Taking one (a successful decrement) pins the section: its
    /// caller can not return before the job is finished, so `section` may be read from then on.
    remaining: Line<AtomicUsize>,
    finished: Line<AtomicUsize>,
    section: Line<UnsafeCell<Section>>,
    in_step: Line<AtomicBool>,
    parked: Vec<Line<AtomicBool>>,
    stop: AtomicBool,
    panicked: AtomicBool,
    oversubscribed: bool,
}

struct Section {
    job: Option<&'static Job>,
    jobs: usize,
}

/// A value alone on its cache lines (two, since x86 fetches pairs).
#[repr(align(128))]
struct Line<T>(T);

// SAFETY: `section` is written by the one caller while `remaining` is zero and no job is unfinished, and read only by
// threads that hold an unfinished job (see `remaining`); everything else is atomic.
unsafe impl Sync for Shared {}
// SAFETY: as above; the job reference inside points to a `Sync` closure.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `threads` threads, the caller included; 0 means one for each core that this process may use.
    ///
    /// With `pin`, each worker stays on one core of the process's set, the first core being left to the caller.
    pub fn new(threads: usize, pin: bool) -> Pool {
        let cores = usable_cores();
        let threads = if threads == 0 { cores.len().max(1) } else { threads };
        let shared = Arc::new(Shared {
            remaining: Line(AtomicUsize::new(0)),
            finished: Line(AtomicUsize::new(0)),
            section: Line(UnsafeCell::new(Section { job: None, jobs: 0 })),
            in_step: Line(AtomicBool::new(false)),
            parked: (1..threads).map(|_| Line(AtomicBool::new(false))).collect(),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            oversubscribed: threads > cores.len(),
        });
        let workers = (1..threads)
            .filter_map(|index| {
                let shared = shared.clone();
                let core = if pin && index < cores.len() { Some(cores[index]) } else { None };
                let spawned = std::thread::Builder::new().name(format!("kernel-{index}")).spawn(move || {
                    if let Some(core) = core {
                        pin_to(core);
                    }
                    shared.work(index);
                });
                // Fewer workers than asked for only cost speed.
                spawned.ok().map(|handle| (handle.thread().clone(), Some(handle)))
            })
            .collect();
        Pool { shared, caller: Mutex::new(()), workers }
    }

    /// Threads that work on a section, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(job, thread)` for every job in `0..jobs`, on several threads, and returns when all are done.
    ///
    /// Jobs start in ascending order. `thread < self.threads()`, and no two calls with the same `thread` overlap. `f` must
    /// not call `run` of the same pool. A panic in `f` is raised again here when all jobs have ended.
    pub fn run(&self, jobs: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        if jobs <= 1 || self.workers.is_empty() {
            for job in 0..jobs {
                f(job, 0);
            }
            return;
        }
        let _turn = self.caller.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The reference is dropped from `section` before this function returns, and it
        // does not return (nor unwind) before every taken job has finished.
        let job: &'static Job = unsafe { std::mem::transmute::<&(dyn Fn(usize, usize) + Sync), &'static Job>(f) };
        shared.finished.0.store(0, Ordering::Relaxed);
        // SAFETY: `remaining` is 0 and the last section's jobs are finished: no other thread reads the section now.
        unsafe { *shared.section.0.get() = Section { job: Some(job), jobs } };
        shared.remaining.0.store(jobs, Ordering::SeqCst);
        for (index, (thread, _)) in self.workers.iter().enumerate() {
            if shared.parked[index].0.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
        shared.take_jobs(0);
        shared.wait_finished(jobs);
        // SAFETY: all jobs are finished, nobody reads the section.
        unsafe { *shared.section.0.get() = Section { job: None, jobs: 0 } };
        if shared.panicked.swap(false, Ordering::AcqRel) {
            panic!("a kernel job panicked; the first message is above");
        }
    }

    /// A step begins: workers keep spinning between its sections.
    pub fn step_begin(&self) {
        self.shared.in_step.0.store(true, Ordering::SeqCst);
    }

    /// The step is over: workers park a little later unless the next one begins.
    pub fn step_end(&self) {
        self.shared.in_step.0.store(false, Ordering::SeqCst);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for (thread, handle) in &mut self.workers {
            thread.unpark();
            if let Some(handle) = handle.take() {
                // A worker only ends by `stop`; its panics are caught and reported by `run`.
                let _ = handle.join();
            }
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

impl Shared {
    fn work(&self, thread: usize) {
        loop {
            if !self.await_jobs(thread) {
                return;
            }
            self.take_jobs(thread);
        }
    }

    /// Spins, then parks, until a job can be taken. False when the pool is dropped.
    fn await_jobs(&self, thread: usize) -> bool {
        let mut since: Option<Instant> = None;
        let mut spins = 0u32;
        loop {
            if self.remaining.0.load(Ordering::Relaxed) != 0 {
                return true;
            }
            if self.stop.load(Ordering::Relaxed) {
                return false;
            }
            std::hint::spin_loop();
            spins += 1;
            if !spins.is_multiple_of(SPINS_PER_LOOK) {
                continue;
            }
            let limit = match (self.oversubscribed, self.in_step.0.load(Ordering::Relaxed)) {
                (true, _) => SPIN_OVERSUBSCRIBED,
                (false, true) => SPIN_IN_STEP,
                (false, false) => SPIN_IDLE,
            };
            if since.get_or_insert_with(Instant::now).elapsed() < limit {
                continue;
            }
            // Announce, look again, then park: `run` publishes jobs before it looks at `parked`.
            let parked = &self.parked[thread - 1].0;
            parked.store(true, Ordering::SeqCst);
            if self.remaining.0.load(Ordering::SeqCst) == 0 && !self.stop.load(Ordering::SeqCst) {
                std::thread::park();
            }
            parked.store(false, Ordering::SeqCst);
            // Spin again even when the section that woke this thread is over: its step has more.
            since = None;
        }
    }

    /// Takes and runs jobs until none is left.
    fn take_jobs(&self, thread: usize) {
        let remaining = &self.remaining.0;
        let mut left = remaining.load(Ordering::Relaxed);
        while left != 0 {
            match remaining.compare_exchange_weak(left, left - 1, Ordering::AcqRel, Ordering::Relaxed) {
                Err(now) => left = now,
                Ok(_) => {
                    // SAFETY: a job is held and unfinished, so the section stays as it is (see `remaining`).
                    let section = unsafe { &*self.section.0.get() };
                    let job = section.jobs - left;
                    if let Some(f) = section.job
                        && catch_unwind(AssertUnwindSafe(|| f(job, thread))).is_err()
                    {
                        self.panicked.store(true, Ordering::Release);
                    }
                    self.finished.0.fetch_add(1, Ordering::AcqRel);
                    left = remaining.load(Ordering::Relaxed);
                }
            }
        }
    }

    fn wait_finished(&self, jobs: usize) {
        let mut since: Option<Instant> = None;
        let mut spins = 0u32;
        while self.finished.0.load(Ordering::Acquire) != jobs {
            std::hint::spin_loop();
            spins += 1;
            if spins.is_multiple_of(SPINS_PER_LOOK)
                && (self.oversubscribed || since.get_or_insert_with(Instant::now).elapsed() > WAIT_BEFORE_YIELD)
            {
                std::thread::yield_now();
            }
        }
    }
}

/// The cores this process may run on, in ascending order.
fn usable_cores() -> Vec<usize> {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect(),
        Err(_) => (0..std::thread::available_parallelism().map_or(1, usize::from)).collect(),
    }
}

/// Pins the calling thread. A refusal (a container that forbids it) only costs speed.
fn pin_to(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// A pointer that jobs use to write disjoint parts of one slice.
#[derive(Clone, Copy)]
pub(crate) struct SharedMut<T>(*mut T);

// SAFETY: whoever dereferences it vouches for disjointness.
unsafe impl<T: Send> Send for SharedMut<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<T> {}

impl<T> SharedMut<T> {
    pub(crate) fn new(slice: &mut [T]) -> SharedMut<T> {
        SharedMut(slice.as_mut_ptr())
    }

    /// The pointer; a method, so that closures capture the wrapper.
    pub(crate) fn get(self) -> *mut T {
        self.0
    }

    /// The part of `len` values at `start`.
    ///
    /// # Safety
    /// The part lies inside the slice, and nobody else uses it while the result lives.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part<'a>(self, start: usize, len: usize) -> &'a mut [T] {
        // SAFETY: passed on to the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn every_job_runs_exactly_once_for_every_pool_size() {
        for threads in 1..=4 {
            let pool = Pool::new(threads, false);
            for jobs in [0usize, 1, 2, 7, 64, 1000] {
                let hits: Vec<AtomicU64> = (0..jobs).map(|_| AtomicU64::new(0)).collect();
                for _ in 0..20 {
                    pool.run(jobs, &|job, thread| {
                        assert!(thread < threads);
                        hits[job].fetch_add(1, Ordering::Relaxed);
                    });
                }
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 20), "{threads} threads, {jobs} jobs");
            }
        }
    }

    #[test]
    fn parked_workers_wake_up_for_the_next_section() {
        let pool = Pool::new(2, true);
        let sum = AtomicU64::new(0);
        for round in 0..3 {
            pool.step_begin();
            for _ in 0..200 {
                pool.run(16, &|job, _| {
                    sum.fetch_add(job as u64, Ordering::Relaxed);
                });
            }
            pool.step_end();
            // Until the worker announces that it is parked: the event, not a time.
            while !pool.shared.parked[0].0.load(Ordering::SeqCst) {
                std::hint::spin_loop();
            }
            assert_eq!(sum.load(Ordering::Relaxed), (round + 1) * 200 * 120);
        }
    }

    #[test]
    fn a_panicking_job_is_raised_and_the_pool_lives_on() {
        let pool = Pool::new(2, false);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run(8, &|job, _| assert!(job != 3, "job three breaks on purpose"));
        }));
        assert!(caught.is_err());
        let count = AtomicU64::new(0);
        pool.run(8, &|_, _| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.load(Ordering::Relaxed), 8);
    }

    #[test]
    fn sections_of_several_callers_take_turns() {
        let pool = Pool::new(2, false);
        let count = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        pool.run(5, &|_, _| {
                            count.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(count.load(Ordering::Relaxed), 1500);
    }
}
