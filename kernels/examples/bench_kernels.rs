//! Prints the rate of every kernel and its share of the roof: `bench_kernels [--threads N] [WORDS...]`.
//!
//! Words choose lines: `bf16 m32`, `=int8 gate_up`. `ERNIED_ISA` forces a level.

#![allow(clippy::print_stdout)]

fn main() {
    let mut threads = 0;
    let mut words = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == "--threads" {
            threads = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(0);
        } else {
            words.push(argument);
        }
    }
    let pool = ernie_kernels::Pool::new(threads, true);
    println!("{}", ernie_kernels::bench::run_with(&pool, ernie_kernels::Isa::selected(), &words.join(" ")));
}
