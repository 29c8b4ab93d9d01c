//! Element types of twins.

/// A plain element of device memory: any bit pattern is a value.
pub trait Element: Copy {}
impl Element for u8 {}
impl Element for u32 {}
impl Element for u64 {}
impl Element for f32 {}
impl Element for f64 {}

/// A floating-point element, with the operations that kernels use, each rounded once to nearest.
pub trait Real: Element + PartialEq + std::fmt::Debug + Default + 'static {
    /// 1/4.
    const QUARTER: Self;
    /// 3/4.
    const THREE_QUARTERS: Self;
    /// Size in bytes.
    const BYTES: u64;
    /// The suffix of the kernels for it.
    const SUFFIX: &'static str;
    /// Sum.
    fn add(self, other: Self) -> Self;
    /// Difference.
    fn sub(self, other: Self) -> Self;
    /// Product.
    fn mul(self, other: Self) -> Self;
    /// The upper bits of a word as a number in [0, 1), exactly: 24 bits in single, 53 in double precision.
    fn unit(word: u64) -> Self;
    /// Its bits, zero-extended.
    fn bits(self) -> u64;
    /// Exactly, in double precision.
    fn widen(self) -> f64;
    /// Rounded to single precision.
    fn narrow(self) -> f32;
}

macro_rules! real {
    ($t:ty, $bytes:literal, $suffix:literal, $shift:literal, $scale:expr, $word:ty) => {
        impl Real for $t {
            const QUARTER: Self = 0.25;
            const THREE_QUARTERS: Self = 0.75;
            const BYTES: u64 = $bytes;
            const SUFFIX: &'static str = $suffix;
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self - other
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn unit(word: u64) -> Self {
                ((word >> $shift) as $word) as $t * $scale
            }
            #[inline(always)]
            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }
            #[inline(always)]
            fn widen(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn narrow(self) -> f32 {
                self as f32
            }
        }
    };
}

real!(f32, 4, "f32", 40, 5.960_464_5e-8, u32); // 2^-24
real!(f64, 8, "f64", 11, 1.1102230246251565e-16, u64); // 2^-53

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_is_exact_at_both_ends() {
        assert_eq!(<f32 as Real>::unit(u64::MAX), 1.0 - f32::EPSILON / 2.0);
        assert_eq!(<f64 as Real>::unit(u64::MAX), 1.0 - f64::EPSILON / 2.0);
        assert_eq!(<f32 as Real>::unit(1 << 40), (-24f32).exp2());
        assert_eq!(<f64 as Real>::unit(1 << 11), (-53f64).exp2());
    }
}
