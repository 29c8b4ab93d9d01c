//! Twins against straightforward code, the registry against the PTX.

use super::*;
use proptest::prelude::*;

/// The digest that `build_ptx.py` writes into the PTX.
fn fnv1a(data: impl IntoIterator<Item = u8>) -> u64 {
    data.into_iter().fold(0xcbf29ce484222325, |h, byte| {
        (h ^ u64::from(byte)).wrapping_mul(0x100000001b3)
    })
}

#[test]
fn ptx_is_made_from_the_sources_as_they_are() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda");
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.retain(|n| n.ends_with(".cu") || n.ends_with(".cuh"));
    names.sort();
    let mut all = Vec::new();
    for name in &names {
        all.extend_from_slice(name.as_bytes());
        all.push(0);
        all.extend(std::fs::read(format!("{folder}/{name}")).unwrap());
        all.push(0);
    }
    let digest = format!("// sources {:016x},", fnv1a(all));
    assert!(
        PTX.starts_with(&digest),
        "run kernels/build_ptx.py: the sources have {digest}"
    );
}

/// Name and parameter sizes of each entry, as the PTX declares them.
fn entries() -> Vec<(String, Vec<usize>)> {
    let mut found: Vec<(String, Vec<usize>)> = Vec::new();
    for line in PTX.lines() {
        if let Some(rest) = line.strip_prefix(".visible .entry ") {
            found.push((rest.trim_end_matches('(').to_owned(), Vec::new()));
        } else if let Some(rest) = line.trim().strip_prefix(".param .") {
            let size = if rest.starts_with("u64") || rest.starts_with("b64") {
                8
            } else {
                4
            };
            found.last_mut().unwrap().1.push(size);
        }
    }
    found
}

#[test]
fn each_kernel_has_a_twin_with_its_parameters() {
    let entries = entries();
    assert_eq!(entries.len(), TWINS.len());
    for (name, params) in entries {
        let twin = twin(&name).unwrap_or_else(|| panic!("{name} has no twin"));
        assert_eq!(twin.params, params, "{name}");
    }
}

#[test]
fn the_ptx_contracts_and_flushes_nothing() {
    for op in ["fma", ".ftz", "mad.f", "add.f", "mul.f", "sub.f"] {
        assert!(!PTX.contains(op), "{op}: every operation must say .rn");
    }
}

/// Runs a twin on host memory, addresses being host addresses.
fn run(name: &str, values: &[u64], launch: Launch) -> Result<(), Fault> {
    // SAFETY: the tests pass addresses of their own buffers, large enough for the sizes beside them.
    unsafe {
        twin(name)
            .unwrap()
            .run(&Params::from_values(values), launch, &|address, _| {
                address as *mut u8
            })
    }
}

fn address<T>(slice: &mut [T], at: usize) -> u64 {
    slice[at..].as_mut_ptr() as u64
}

/// A field with one halo cell on each side, as nested vectors: (row + 1, col + 1).
fn nested(rows: usize, cols: usize, seed: u64) -> Vec<Vec<f64>> {
    let value = |r: usize, c: usize| {
        f64::from((generator::pattern_word(seed, (r * (cols + 2) + c) as u64) >> 40) as u32) / 3.0
    };
    (0..rows + 2)
        .map(|r| (0..cols + 2).map(|c| value(r, c)).collect())
        .collect()
}

fn check_step<T: Real>(
    rows: usize,
    cols: usize,
    pad: usize,
    seed: u64,
    from: fn(f64) -> T,
    mean: fn([T; 4]) -> T,
) {
    let pitch = cols + 2 + pad;
    let reference = nested(rows, cols, seed);
    let mut input = vec![T::default(); (rows + 2) * pitch];
    let mut out = input.clone();
    for r in 0..rows + 2 {
        for c in 0..cols + 2 {
            input[r * pitch + c] = from(reference[r][c]);
        }
    }
    let values = [
        address(&mut out, pitch + 1),
        address(&mut input, pitch + 1),
        rows as u64,
        cols as u64,
        pitch as u64,
    ];
    run(
        &format!("jacobi_step_{}", T::SUFFIX),
        &values,
        shape_2d(rows as u64, cols as u64),
    )
    .unwrap();
    for r in 0..rows + 2 {
        for c in 0..pitch {
            let inside = (1..=rows).contains(&r) && (1..=cols).contains(&c);
            let at = |r: usize, c: usize| from(reference[r][c]);
            let want = if inside {
                mean([at(r, c - 1), at(r, c + 1), at(r - 1, c), at(r + 1, c)])
            } else {
                T::default()
            };
            assert_eq!(out[r * pitch + c].bits(), want.bits(), "cell ({r}, {c})");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn step_is_the_mean_of_four_neighbours(rows in 1usize..20, cols in 1usize..40, pad in 0usize..5, seed: u64) {
        check_step::<f32>(rows, cols, pad, seed, |v| v as f32, |[w, e, n, s]| ((w + e) + (n + s)) / 4.0);
        check_step::<f64>(rows, cols, pad, seed, |v| v, |[w, e, n, s]| ((w + e) + (n + s)) / 4.0);
    }

    #[test]
    fn norms_agree_with_plain_loops(rows in 1usize..30, cols in 1usize..70, pad in 0usize..5, blocks in 1u32..4, seed: u64) {
        let pitch = cols + pad;
        let value = |s: u64, i: usize| (generator::pattern_word(s, i as u64) >> 11) as f64 / (1u64 << 53) as f64;
        let mut a: Vec<f64> = (0..rows * pitch).map(|i| value(seed, i)).collect();
        let mut b: Vec<f64> = (0..rows * pitch).map(|i| value(!seed, i)).collect();
        let cells: Vec<usize> = (0..rows).flat_map(|r| (0..cols).map(move |c| r * pitch + c)).collect();
        let largest = cells.iter().map(|&i| (a[i] - b[i]).abs()).fold(0.0, f64::max);
        let squares: f64 = cells.iter().map(|&i| (a[i] - b[i]).powi(2)).sum();
        let mut partial = vec![-1f64; blocks as usize + 1];
        let values = [address(&mut a, 0), address(&mut b, 0), rows as u64, cols as u64, pitch as u64, address(&mut partial, 0)];
        let launch = Launch { grid: [blocks, 1, 1], block: [NORM_THREADS, 1, 1] };
        run("norm_max_f64", &values, launch).unwrap();
        prop_assert_eq!(partial[..blocks as usize].iter().copied().fold(0.0, f64::max), largest);
        run("norm_l2_f64", &values, launch).unwrap();
        let sum: f64 = partial[..blocks as usize].iter().sum();
        prop_assert!((sum - squares).abs() <= 1e-12 * squares.max(1.0), "{} {}", sum, squares);
        prop_assert_eq!(partial[blocks as usize], -1.0, "nothing behind the last block");
    }

    #[test]
    fn columns_survive_packing(rows in 1usize..50, cols in 1usize..9, col in 0usize..9) {
        let col = col % cols;
        let mut field: Vec<u64> = (0..rows * cols).map(|i| i as u64).collect();
        let (mut packed, mut back) = (vec![0u64; rows], vec![u64::MAX; rows * cols]);
        let (n, pitch) = (rows as u64, cols as u64);
        run("pack_column_b64", &[address(&mut packed, 0), address(&mut field, col), n, pitch], shape_1d(n)).unwrap();
        prop_assert!(packed.iter().enumerate().all(|(r, &v)| v == (r * cols + col) as u64));
        run("unpack_column_b64", &[address(&mut back, col), address(&mut packed, 0), n, pitch], shape_1d(n)).unwrap();
        for (i, &v) in back.iter().enumerate() {
            prop_assert_eq!(v, if i % cols == col { i as u64 } else { u64::MAX });
        }
    }

    #[test]
    fn patterns_hold_at_any_offset(bytes in 0usize..100, start in 0u64..40, shift in 0usize..8, broken in 0usize..100, seed: u64) {
        let mut buffer = vec![0x55u8; bytes + 16];
        let mut result = [0u64, u64::MAX];
        let fill = [address(&mut buffer, shift), bytes as u64, seed, start];
        run("fill_pattern", &fill, shape_1d(bytes as u64)).unwrap();
        prop_assert!(buffer[..shift].iter().chain(&buffer[shift + bytes..]).all(|&b| b == 0x55));
        prop_assert!((0..bytes).all(|i| buffer[shift + i] == generator::pattern_byte(seed, start + i as u64)));
        let compare = [fill[0], fill[1], seed, start, address(&mut result, 0)];
        run("compare_pattern", &compare, shape_1d(bytes as u64)).unwrap();
        prop_assert_eq!(result, [0, u64::MAX]);
        if broken < bytes {
            buffer[shift + broken] ^= 1;
            run("compare_pattern", &compare, shape_1d(bytes as u64)).unwrap();
            prop_assert_eq!(result, [1, broken as u64]);
        }
    }
}

#[test]
fn a_nan_never_looks_converged() {
    let (mut a, mut b) = (vec![1f32; 1000], vec![1f32; 1000]);
    a[3] = f32::NAN;
    let mut partial = [0f64; 2];
    let launch = Launch {
        grid: [2, 1, 1],
        block: [NORM_THREADS, 1, 1],
    };
    run(
        "norm_max_f32",
        &[
            address(&mut a, 0),
            address(&mut b, 0),
            10,
            100,
            100,
            address(&mut partial, 0),
        ],
        launch,
    )
    .unwrap();
    assert!(partial[0].is_nan());
}

#[test]
fn a_norm_refuses_other_blocks() {
    let launch = Launch {
        grid: [1, 1, 1],
        block: [128, 1, 1],
    };
    assert_eq!(
        run("norm_max_f32", &[0, 0, 1, 1, 1, 0], launch),
        Err(Fault::InvalidLaunch)
    );
}

#[test]
fn the_hash_of_a_field_is_the_sum_over_its_parts() {
    let (rows, cols) = (11u64, 7u64);
    let mut field: Vec<f64> = (0..rows * cols).map(|i| i as f64 * 0.37).collect();
    let mut part = |row: u64, col: u64, n: u64, m: u64| {
        let mut sum = [0u64];
        let values = [
            address(&mut field, (row * cols + col) as usize),
            n,
            m,
            cols,
            row,
            col,
            address(&mut sum, 0),
        ];
        run("field_hash_f64", &values, shape_2d(n, m)).unwrap();
        sum[0]
    };
    let whole = part(0, 0, rows, cols);
    let parts = part(0, 0, 4, 3)
        .wrapping_add(part(0, 3, 4, 4))
        .wrapping_add(part(4, 0, 7, cols));
    assert_eq!(whole, parts);
    field.swap(0, 1);
    let mut sum = [0u64];
    run(
        "field_hash_f64",
        &[
            address(&mut field, 0),
            rows,
            cols,
            cols,
            0,
            0,
            address(&mut sum, 0),
        ],
        shape_2d(rows, cols),
    )
    .unwrap();
    assert_ne!(sum[0], whole, "swapped cells must show");
}

#[test]
fn fills_depend_on_global_coordinates_only() {
    let mut whole = vec![0f32; 64];
    let mut part = vec![0f32; 6];
    run(
        "field_fill_f32",
        &[
            address(&mut whole, 0),
            8,
            8,
            8,
            (-1i64) as u64,
            (-1i64) as u64,
            5,
            2,
        ],
        shape_2d(8, 8),
    )
    .unwrap();
    run(
        "field_fill_f32",
        &[address(&mut part, 0), 2, 3, 3, 2, 4, 5, 2],
        shape_2d(2, 3),
    )
    .unwrap();
    assert_eq!(part[..3], whole[3 * 8 + 5..3 * 8 + 8]);
    assert_eq!(part[3..], whole[4 * 8 + 5..4 * 8 + 8]);
}

#[test]
fn samples_of_parts_make_the_whole_picture() {
    let (rows, cols, height, width) = (10u64, 9u64, 4u64, 18u64);
    let mut field: Vec<f64> = (0..rows * cols).map(|i| i as f64).collect();
    let mut picture = vec![-1f32; (height * width) as usize];
    for (row, n) in [(0, 3u64), (3, 7)] {
        let part = address(&mut field, (row * cols) as usize);
        let values = [
            address(&mut picture, 0),
            height,
            width,
            part,
            n,
            cols,
            cols,
            row,
            0,
            rows,
            cols,
        ];
        run("field_sample_f64", &values, shape_2d(height, width)).unwrap();
    }
    for y in 0..height {
        for x in 0..width {
            let want = ((y * rows / height) * cols + x * cols / width) as f32;
            assert_eq!(picture[(y * width + x) as usize], want, "pixel ({y}, {x})");
        }
    }
}

#[test]
fn a_step_says_what_it_touches() {
    let params = Params::from_values(&[1 << 20, 2 << 20, 3, 5, 16]);
    let list = (twin("jacobi_step_f32").unwrap().accesses)(&params, shape_2d(3, 5));
    let reads: Vec<_> = list
        .iter()
        .filter(|a| a.reads())
        .map(|a| (a.address, a.bytes(), a.span_bytes()))
        .collect();
    assert_eq!(
        reads,
        [
            ((2 << 20) - 4, 84, 156),
            ((2 << 20) - 64, 20, 20),
            ((2 << 20) + 192, 20, 20)
        ]
    );
    let writes: Vec<_> = list
        .iter()
        .filter(|a| a.writes())
        .map(|a| (a.address, a.bytes(), a.span_bytes()))
        .collect();
    assert_eq!(writes, [(1 << 20, 60, 148)]);
}
