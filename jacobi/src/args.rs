//! The command line.

use crate::failure::{Failure, Outcome};
use clap::{Parser, ValueEnum};
use std::path::PathBuf;
use std::str::FromStr;

/// Jacobi iteration on a 2-D domain: one MPI rank per GPU, halos exchanged by MPI on device buffers.
///
/// Each cell becomes the mean of its four neighbours. The domain is split by rows into a ring of ranks unless --dims
/// says otherwise. Results depend on size, type, boundary, seed and iterations only, never on the number of ranks.
#[derive(Clone, Debug, Parser)]
#[command(name = "jacobi", version, max_term_width = 100)]
pub struct Args {
    /// Cells of the domain, ROWSxCOLS; K, M and G multiply by 2^10, 2^20 and 2^30
    #[arg(long, default_value = "4096x4096", value_name = "ROWSxCOLS")]
    pub size: Size,
    /// Grid of ranks, rows x columns [default: all ranks by rows]
    #[arg(long, value_name = "PxQ")]
    pub dims: Option<Dims>,
    /// What lies beyond the edges of the domain
    #[arg(long, value_enum, default_value_t = Boundary::Ring)]
    pub boundary: Boundary,
    /// Type of a cell
    #[arg(long = "type", value_enum, default_value_t = CellType::Float, value_name = "TYPE")]
    pub cell: CellType,
    /// Most iterations to do
    #[arg(long, default_value_t = 1000, value_name = "N")]
    pub iterations: u64,
    /// Stop when the norm of the change falls below this [default: never]
    #[arg(
        long,
        default_value_t = 0.0,
        value_name = "X",
        hide_default_value = true
    )]
    pub tolerance: f64,
    /// Norm of the change of one iteration; the L2 norm is rounded differently for each number of ranks
    #[arg(long, value_enum, default_value_t = NormKind::Max)]
    pub norm: NormKind,
    /// Compute the norm every K iterations, and after the last; 0: after the last only
    #[arg(long, default_value_t = 100, value_name = "K")]
    pub norm_every: u64,
    /// Iterations before the clock starts; the field is then set anew
    #[arg(long, default_value_t = 10, value_name = "N")]
    pub warmup: u64,
    /// Seed of the initial field and of fixed edges
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// How halos are exchanged
    #[arg(long, value_enum, default_value_t = ExchangeKind::TwoPhase)]
    pub exchange: ExchangeKind,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a picture of the final field
    #[arg(long, value_name = "FILE")]
    pub png: Option<PathBuf>,
    /// Compare the final field, bit for bit, with one that the host computes in one piece
    #[arg(long)]
    pub check: bool,
    /// Print a hash of the final field, the same for any number of ranks
    #[arg(long)]
    pub dump_hash: bool,
    /// First compare each kernel with its host twin on random input
    #[arg(long)]
    pub compare_kernels: bool,
    /// Compare each kernel with its host twin on random input, then stop
    #[arg(long)]
    pub self_test: bool,
}

/// Beyond the edges of the domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Boundary {
    /// Rows are periodic, columns end at fixed values
    Ring,
    /// All four edges are fixed values
    Fixed,
    /// Rows and columns are periodic
    Torus,
}

/// Type of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CellType {
    /// 32 bits
    Float,
    /// 64 bits
    Double,
}

/// Norm of the change of one iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NormKind {
    /// The largest change of a cell
    Max,
    /// The square root of the sum of squares
    L2,
}

/// How halos are exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExchangeKind {
    /// One MPI_Sendrecv for each direction, one after the other
    TwoPhase,
    /// All MPI_Irecv and MPI_Isend at once, then MPI_Waitall
    Concurrent,
}

/// The name that an option's value has on the command line.
pub fn name(value: impl ValueEnum) -> String {
    value
        .to_possible_value()
        .map_or(String::new(), |v| v.get_name().to_owned())
}

/// Cells of the domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Number of rows.
    pub rows: u64,
    /// Number of columns.
    pub cols: u64,
}

/// Largest number of cells: far beyond any machine, and small enough that no size in bytes overflows.
const CELLS_MAX: u64 = 1 << 48;

impl FromStr for Size {
    type Err = String;
    fn from_str(text: &str) -> Result<Size, String> {
        let (rows, cols) = pair(text, count)?;
        match rows.checked_mul(cols) {
            Some(cells) if cells <= CELLS_MAX => Ok(Size { rows, cols }),
            _ => Err("more than 2^48 cells".to_owned()),
        }
    }
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}", self.rows, self.cols)
    }
}

/// Grid of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Ranks along a column of the grid: parts that the rows are split into.
    pub rows: u32,
    /// Ranks along a row of the grid: parts that the columns are split into.
    pub cols: u32,
}

impl FromStr for Dims {
    type Err = String;
    fn from_str(text: &str) -> Result<Dims, String> {
        let number = |t: &str| {
            t.parse::<u32>()
                .ok()
                .filter(|&n| n > 0)
                .ok_or_else(|| format!("'{t}' is not a positive number"))
        };
        let (rows, cols) = pair(text, number)?;
        Ok(Dims { rows, cols })
    }
}

/// Two values with an x between them.
fn pair<T>(text: &str, value: impl Fn(&str) -> Result<T, String>) -> Result<(T, T), String> {
    let (a, b) = text.split_once(['x', 'X']).ok_or("not of the form AxB")?;
    Ok((value(a)?, value(b)?))
}

/// A positive count with an optional binary suffix.
fn count(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let plain = digits.bytes().all(|b| b.is_ascii_digit());
    let number: Option<u64> = digits.parse().ok().filter(|&n| n > 0 && plain);
    number
        .and_then(|n| n.checked_mul(1 << shift))
        .ok_or_else(|| format!("'{text}' is not a positive count"))
}

impl Args {
    /// Checks what single options cannot, and fills in the grid of ranks.
    pub fn grid(&self, ranks: u32) -> Outcome<Dims> {
        if self.tolerance.is_nan() || self.tolerance < 0.0 {
            return Err(Failure::input("--tolerance must be zero or positive"));
        }
        if self.tolerance > 0.0 && self.norm_every == 0 {
            return Err(Failure::input(
                "--tolerance needs the norm while iterating: give --norm-every 1 or more",
            ));
        }
        let dims = self.dims.unwrap_or(Dims {
            rows: ranks,
            cols: 1,
        });
        let product = u64::from(dims.rows) * u64::from(dims.cols);
        if product != u64::from(ranks) {
            return Err(Failure::input(format!(
                "--dims {}x{} needs {product} ranks, there are {ranks}",
                dims.rows, dims.cols
            )));
        }
        if u64::from(dims.rows) > self.size.rows || u64::from(dims.cols) > self.size.cols {
            let grid = format!("{}x{}", dims.rows, dims.cols);
            return Err(Failure::input(format!(
                "{} cells cannot be split over {grid} ranks: each rank needs a row and a column",
                self.size
            )));
        }
        Ok(dims)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        Args::try_parse_from(std::iter::once("jacobi").chain(line.split_whitespace()))
    }

    #[test]
    fn sizes_take_binary_suffixes() {
        assert_eq!(
            "8x1G".parse(),
            Ok(Size {
                rows: 8,
                cols: 1 << 30
            })
        );
        assert_eq!(
            "3K X5m".replace(' ', "").parse(),
            Ok(Size {
                rows: 3072,
                cols: 5 << 20
            })
        );
        for bad in [
            "",
            "8",
            "x8",
            "8x",
            "0x8",
            "-1x8",
            "+1x8",
            "8x8x8",
            "1.5Kx8",
            "99999999999Gx1",
            "1Gx1G",
            "Kx1",
            "8x1T",
        ] {
            assert!(bad.parse::<Size>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_grid_must_fit_ranks_and_domain() {
        let args = parse("--size 10x7 --dims 2x3").unwrap();
        assert_eq!(args.grid(6), Ok(Dims { rows: 2, cols: 3 }));
        assert!(args
            .grid(5)
            .unwrap_err()
            .message
            .contains("needs 6 ranks, there are 5"));
        assert_eq!(
            parse("--size 10x7").unwrap().grid(10),
            Ok(Dims { rows: 10, cols: 1 })
        );
        assert!(parse("--size 10x7").unwrap().grid(11).is_err());
    }

    #[test]
    fn a_tolerance_needs_norms() {
        assert!(parse("--tolerance 1e-3 --norm-every 0")
            .unwrap()
            .grid(1)
            .is_err());
        assert!(parse("--tolerance nan").unwrap().grid(1).is_err());
        assert!(parse("--tolerance 1e-3").unwrap().grid(1).is_ok());
    }
}
