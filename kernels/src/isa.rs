//! Instruction-set levels: what this CPU has, and which level the process uses.
//!
//! The level is chosen once; kernels are picked from one static table per level (`table.rs`). Results may differ between
//! levels, never within one.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// Environment variable that forces a level, for tests and for comparing levels on one machine.
pub const ISA_VARIABLE: &str = "ERNIED_ISA";

/// A set of instructions that one family of kernels needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Portable code, also the definition that the others are tested against.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// `Avx2` with 256-bit VNNI dot products.
    AvxVnni,
    /// AVX-512 F/BW/VL/DQ with VNNI, without bf16 arithmetic.
    Avx512,
    /// `Avx512` with bf16 dot products.
    Avx512Bf16,
    /// `Avx512Bf16` with AMX tiles for bf16 and 8-bit products.
    Amx,
    /// 64-bit Arm with Advanced SIMD.
    Neon,
    /// `Neon` with dot products of bytes.
    NeonDot,
}

impl Isa {
    /// All levels, weakest first.
    pub const ALL: [Isa; 8] =
        [Isa::Scalar, Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx, Isa::Neon, Isa::NeonDot];

    /// The best level of this CPU.
    pub fn detect() -> Isa {
        Isa::ALL.into_iter().rev().find(|isa| isa.available()).unwrap_or(Isa::Scalar)
    }

    /// Whether this CPU can run the level's kernels.
    #[cfg(target_arch = "x86_64")]
    pub fn available(self) -> bool {
        let avx2 =
            || is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        let avx512 = || {
            avx2()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vnni")
        };
        match self {
            Isa::Scalar => true,
            Isa::Avx2 => avx2(),
            Isa::AvxVnni => avx2() && is_x86_feature_detected!("avxvnni"),
            Isa::Avx512 => avx512(),
            Isa::Avx512Bf16 => avx512() && is_x86_feature_detected!("avx512bf16"),
            Isa::Amx => Isa::Avx512Bf16.available() && crate::x86_64::amx::available(),
            Isa::Neon | Isa::NeonDot => false,
        }
    }

    /// Whether this CPU can run the level's kernels.
    #[cfg(target_arch = "aarch64")]
    pub fn available(self) -> bool {
        match self {
            Isa::Scalar => true,
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            Isa::NeonDot => Isa::Neon.available() && std::arch::is_aarch64_feature_detected!("dotprod"),
            _ => false,
        }
    }

    /// Whether this CPU can run the level's kernels.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub fn available(self) -> bool {
        matches!(self, Isa::Scalar)
    }

    /// The levels this CPU can run, weakest first: what a test of "all levels" walks.
    pub fn all_available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.available())
    }

    /// The level this process uses: `ERNIED_ISA` when it names one that the CPU has, else the best one.
    ///
    /// A name that is unknown or not available is ignored here; `check_override` reports it.
    pub fn selected() -> Isa {
        static SELECTED: OnceLock<Isa> = OnceLock::new();
        *SELECTED.get_or_init(|| Isa::check_override().ok().flatten().unwrap_or_else(Isa::detect))
    }

    /// What `ERNIED_ISA` asks for, or why it can not be had. Meant for the start of a process.
    pub fn check_override() -> Result<Option<Isa>, IsaError> {
        let Some(name) = std::env::var_os(ISA_VARIABLE) else { return Ok(None) };
        let isa: Isa = name.to_string_lossy().parse()?;
        if !isa.available() {
            return Err(IsaError::NotAvailable { isa });
        }
        Ok(Some(isa))
    }

    /// The name used in `ERNIED_ISA`, in status reports and in benchmark tables.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::Amx => "amx",
            Isa::Neon => "neon",
            Isa::NeonDot => "neon-dot",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = IsaError;
    fn from_str(name: &str) -> Result<Isa, IsaError> {
        let wanted = name.to_ascii_lowercase().replace('_', "-");
        let found = Isa::ALL.into_iter().find(|isa| isa.name() == wanted);
        found.ok_or_else(|| IsaError::Unknown { name: name.to_owned() })
    }
}

/// Why a forced level can not be used.
#[derive(Debug, PartialEq, Eq)]
pub enum IsaError {
    /// The name is none of ours.
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// The CPU lacks the level's instructions, or the kernel withholds them.
    NotAvailable {
        /// What was asked for.
        isa: Isa,
    },
}

impl fmt::Display for IsaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = match self {
            IsaError::Unknown { .. } => Isa::ALL.iter().map(|isa| isa.name()).collect(),
            IsaError::NotAvailable { .. } => Isa::all_available().map(Isa::name).collect(),
        };
        let names = names.join(", ");
        match self {
            IsaError::Unknown { name } => {
                write!(f, "{ISA_VARIABLE}={name} names no instruction-set level; use one of {names}")
            }
            IsaError::NotAvailable { isa } => {
                write!(
                    f,
                    "{ISA_VARIABLE}={isa}: this machine does not offer these instructions (its CPU lacks them, or its kernel does not \
                     let processes use them); unset the variable, or use one of {names}"
                )
            }
        }
    }
}

impl std::error::Error for IsaError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_is_found_by_its_name() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse(), Ok(isa));
        }
        assert_eq!("AVX512_BF16".parse(), Ok(Isa::Avx512Bf16));
        let message = "sse9".parse::<Isa>().unwrap_err().to_string();
        assert!(message.contains("sse9") && message.contains("avx2"), "{message}");
    }

    #[test]
    fn the_detected_level_is_available() {
        assert!(Isa::detect().available());
        assert!(Isa::selected().available());
    }
}
