//! Each kernel against its host twin, bit for bit, on random input.

use crate::failure::{Failure, Outcome};
use crate::gpu::Gpu;
use anabranch_kernels::{
    generator, shape_1d, shape_2d, shape_norm, shape_step, twin, Launch, Params, TWINS,
};

/// An argument of a case.
#[derive(Clone, Copy)]
enum Arg {
    /// Address of a byte in one of the case's buffers.
    At(usize, u64),
    /// A number.
    Number(u64),
}
use Arg::{At, Number};

/// One launch on buffers of its own.
struct Case {
    kernel: &'static str,
    args: Vec<Arg>,
    buffers: Vec<Vec<u8>>,
    launch: Launch,
}

/// Runs all cases. Returns how many.
///
/// # Errors
/// Names the first kernel whose result differs from its twin's.
pub fn run(gpu: &Gpu) -> Outcome<usize> {
    let mut cases = 0;
    for twin in TWINS {
        let mut of_this = 0;
        for shape in [(1, 1), (37, 53), (300, 8), (3, 5000)] {
            let case = case(twin.name, shape)
                .ok_or_else(|| Failure::wrong(format!("no self-test for {}", twin.name)))?;
            compare(gpu, &case)?;
            of_this += 1;
        }
        cases += of_this;
    }
    Ok(cases)
}

fn compare(gpu: &Gpu, case: &Case) -> Outcome<()> {
    let wanted = on_host(case)?;
    let got = on_device(gpu, case)?;
    for (index, (wanted, got)) in wanted.iter().zip(&got).enumerate() {
        if let Some(at) = wanted.iter().zip(got).position(|(a, b)| a != b) {
            let kernel = case.kernel;
            return Err(Failure::wrong(format!(
                "kernel {kernel} differs from its host twin at byte {at} of buffer {index} on {}",
                gpu.name
            )));
        }
    }
    Ok(())
}

fn values(case: &Case, addresses: &[u64]) -> Vec<u64> {
    let value = |arg: &Arg| match *arg {
        At(buffer, offset) => addresses[buffer] + offset,
        Number(n) => n,
    };
    case.args.iter().map(value).collect()
}

fn on_host(case: &Case) -> Outcome<Vec<Vec<u8>>> {
    // Words, so that host addresses are aligned as device addresses are.
    let mut copies: Vec<Vec<u64>> = case.buffers.iter().map(|b| to_words(b)).collect();
    let addresses: Vec<u64> = copies.iter_mut().map(|c| c.as_mut_ptr() as u64).collect();
    let twin =
        twin(case.kernel).ok_or_else(|| Failure::wrong(format!("{} has no twin", case.kernel)))?;
    // SAFETY: every address of a case lies in its buffers, of which each is as long as its kernel touches.
    let outcome = unsafe {
        twin.run(
            &Params::from_values(&values(case, &addresses)),
            case.launch,
            &|a, _| a as *mut u8,
        )
    };
    outcome
        .map_err(|fault| Failure::wrong(format!("the twin of {} failed: {fault}", case.kernel)))?;
    let bytes = |(copy, buffer): (&Vec<u64>, &Vec<u8>)| {
        let all: Vec<u8> = copy.iter().flat_map(|w| w.to_le_bytes()).collect();
        all[..buffer.len()].to_vec()
    };
    Ok(copies.iter().zip(&case.buffers).map(bytes).collect())
}

fn to_words(bytes: &[u8]) -> Vec<u64> {
    let word = |chunk: &[u8]| {
        let mut padded = [0u8; 8];
        padded[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(padded)
    };
    bytes.chunks(8).map(word).collect()
}

fn on_device(gpu: &Gpu, case: &Case) -> Outcome<Vec<Vec<u8>>> {
    let mut buffers = Vec::new();
    for host in &case.buffers {
        let buffer = gpu.allocate(host.len() as u64)?;
        gpu.upload(&buffer, host)?;
        buffers.push(buffer);
    }
    let addresses: Vec<u64> = buffers.iter().map(|b| b.address).collect();
    // SAFETY: as on the host: every address lies in these buffers.
    unsafe { gpu.launch(case.kernel, &values(case, &addresses), case.launch)? };
    let mut results = case.buffers.clone();
    for (result, buffer) in results.iter_mut().zip(&buffers) {
        gpu.download(result, buffer, 0)?;
    }
    Ok(results)
}

/// Random cells of magnitude below 2, subnormal and negative ones among them, never infinite or NaN.
fn cells(count: u64, wide: bool, seed: u64) -> Vec<u8> {
    let word = |i: u64| {
        let bits = generator::pattern_word(seed, i);
        // Where every exponent is as likely as any other, hardly two cells would share a binade: make half of them alike.
        match (wide, i % 2) {
            (true, 0) => (bits & 0xbfff_ffff_ffff_ffff).to_le_bytes().to_vec(),
            (true, _) => (bits & 0x800f_ffff_ffff_ffff | 0x3fe0_0000_0000_0000)
                .to_le_bytes()
                .to_vec(),
            (false, 0) => (bits as u32 & 0xbfff_ffff).to_le_bytes().to_vec(),
            (false, _) => (bits as u32 & 0x807f_ffff | 0x3f00_0000)
                .to_le_bytes()
                .to_vec(),
        }
    };
    (0..count).flat_map(word).collect()
}

fn noise(count: u64, seed: u64) -> Vec<u8> {
    (0..count)
        .map(|i| generator::pattern_byte(seed, i))
        .collect()
}

/// Counters of the comparing kernels as their callers set them.
fn counters() -> Vec<u8> {
    [0u64.to_le_bytes(), u64::MAX.to_le_bytes()].concat()
}

/// The case of a kernel on about `rows` x `cols` cells.
#[allow(
    clippy::too_many_lines,
    reason = "one case after the other of each kernel"
)]
fn case(kernel: &'static str, (rows, cols): (u64, u64)) -> Option<Case> {
    let wide = kernel.ends_with("64");
    let element = if wide { 8 } else { 4 };
    let pitch = cols + 5;
    let field = |seed| cells((rows + 2) * pitch, wide, seed);
    let inner = (pitch + 1) * element;
    let bytes = rows * cols + 13;
    let (r, c, p) = (Number(rows), Number(cols), Number(pitch));
    let shape = shape_2d(rows, cols);
    let (args, buffers, launch) = match kernel.rsplit_once('_').map_or(kernel, |(stem, _)| stem) {
        "jacobi_step" => (
            vec![At(0, inner), At(1, inner), r, c, p],
            vec![field(1), field(2)],
            shape_step(rows, cols),
        ),
        "norm_max" | "norm_l2" => {
            let launch = shape_norm(rows, cols);
            let partial = noise(u64::from(launch.grid[0]) * 8, 3);
            (
                vec![At(0, inner), At(1, inner), r, c, p, At(2, 0)],
                vec![field(1), field(2), partial],
                launch,
            )
        }
        "field_fill" => {
            let place = [Number(-7i64 as u64), Number(1 << 40)];
            (
                vec![
                    At(0, inner),
                    r,
                    c,
                    p,
                    place[0],
                    place[1],
                    Number(42),
                    Number(3),
                ],
                vec![field(1)],
                shape,
            )
        }
        "field_hash" => {
            let place = [Number(1 << 33), Number(5)];
            (
                vec![At(0, inner), r, c, p, place[0], place[1], At(1, 0)],
                vec![field(1), noise(8, 2)],
                shape,
            )
        }
        "field_sample" => {
            let (height, width) = (rows + 9, cols / 2 + 3);
            let whole = [Number(4), Number(2), Number(rows + 11), Number(cols + 5)];
            let args = vec![
                At(0, 0),
                Number(height),
                Number(width),
                At(1, inner),
                r,
                c,
                p,
                whole[0],
                whole[1],
                whole[2],
                whole[3],
            ];
            (
                args,
                vec![noise(height * width * 4, 3), field(1)],
                shape_2d(height, width),
            )
        }
        "pack_column" => (
            vec![At(0, 0), At(1, inner), r, p],
            vec![noise(rows * element, 3), field(1)],
            shape_1d(rows),
        ),
        "unpack_column" => (
            vec![At(0, inner), At(1, 0), r, p],
            vec![field(1), noise(rows * element, 3)],
            shape_1d(rows),
        ),
        _ => byte_case(kernel, bytes)?,
    };
    Some(Case {
        kernel,
        args,
        buffers,
        launch,
    })
}

/// The cases of kernels on raw memory, at odd offsets, with some bytes that differ.
fn byte_case(kernel: &str, bytes: u64) -> Option<(Vec<Arg>, Vec<Vec<u8>>, Launch)> {
    let n = Number(bytes);
    let other = |mut same: Vec<u8>| {
        let length = same.len();
        same[length / 2] ^= 0x10;
        same[length - 4] ^= 0x01;
        same
    };
    let (args, buffers) = match kernel {
        "fill_bytes" => (
            vec![At(0, 3), n, Number(0x1ff5a)],
            vec![noise(bytes + 11, 1)],
        ),
        "fill_pattern" => (
            vec![At(0, 5), n, Number(7), Number(12)],
            vec![noise(bytes + 11, 1)],
        ),
        "compare_pattern" => {
            let pattern: Vec<u8> = (0..bytes + 11)
                .map(|i| generator::pattern_byte(7, (i + 20) - 5))
                .collect();
            (
                vec![At(0, 5), n, Number(7), Number(20), At(1, 0)],
                vec![other(pattern), counters()],
            )
        }
        "compare_buffers" => {
            let (a, b) = (noise(bytes + 3, 1), other(noise(bytes + 3, 1)));
            (
                vec![At(0, 3), At(1, 3), n, At(2, 0)],
                vec![a, b, counters()],
            )
        }
        _ => return None,
    };
    Some((args, buffers, shape_1d(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_a_case_that_changes_something() {
        for twin in TWINS {
            let case = case(twin.name, (37, 53)).unwrap_or_else(|| panic!("{}", twin.name));
            assert_eq!(case.args.len(), twin.params.len(), "{}", twin.name);
            assert_ne!(on_host(&case).unwrap(), case.buffers, "{}", twin.name);
        }
    }

    #[test]
    fn random_cells_are_finite() {
        for chunk in cells(1000, false, 5).chunks_exact(4) {
            assert!(f32::from_le_bytes(chunk.try_into().unwrap()).abs() <= 2.0);
        }
        for chunk in cells(1000, true, 5).chunks_exact(8) {
            assert!(f64::from_le_bytes(chunk.try_into().unwrap()).abs() <= 2.0);
        }
    }
}
