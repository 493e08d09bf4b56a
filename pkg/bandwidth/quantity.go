// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"fmt"
	"math/big"
	"strconv"
	"strings"
)

// parseQuantity parses a Kubernetes quantity (k8s.io/apimachinery/pkg/api/resource) such as 20M, 1.5Gi or 2e6. Like Kubernetes, it rounds a
// fraction up. ok is false if the text is no quantity.
func parseQuantity(text string) (n *big.Int, ok bool) {
	if len(text) > 40 {
		return nil, false
	}
	text = strings.TrimPrefix(text, "+")
	suffix := strings.TrimLeft(text, "0123456789.")
	factor, ok := factorOf(suffix)
	if !ok {
		return nil, false
	}
	value, ok := new(big.Rat).SetString(strings.TrimSuffix(text, suffix)) // digits and points: SetString accepts the same as Kubernetes
	if !ok {
		return nil, false
	}
	value.Mul(value, factor)
	up := new(big.Int).Add(value.Num(), new(big.Int).Sub(value.Denom(), big.NewInt(1)))
	return up.Div(up, value.Denom()), true
}

// factorOf returns the factor for the suffix of a quantity, such as 1000 for "k".
func factorOf(suffix string) (*big.Rat, bool) {
	const larger = "KMGTPE"
	if power := strings.Index(larger, strings.TrimSuffix(suffix, "i")); len(suffix) == 2 && suffix[1] == 'i' && power >= 0 {
		return new(big.Rat).SetInt(new(big.Int).Lsh(big.NewInt(1), uint(10*(power+1)))), true
	}
	exponent := 0
	if len(suffix) > 1 {
		digits, err := strconv.Atoi(suffix[1:])
		if err != nil || suffix[0] != 'e' && suffix[0] != 'E' || digits < -99 || digits > 99 {
			return nil, false
		}
		exponent = digits
	} else if suffix != "" {
		power := strings.Index("num.kMGTPE", suffix)
		if power < 0 || suffix == "." {
			return nil, false
		}
		exponent = 3 * (power - 3)
	}
	return new(big.Rat).SetString(fmt.Sprintf("1e%d", exponent))
}

// ParseRate parses a rate in bits per second, in the syntax of the pod annotations. "none" means 0.
func ParseRate(text string) (uint64, error) {
	if text == "none" {
		return 0, nil
	}
	rate, ok := parseQuantity(text)
	if !ok {
		return 0, fmt.Errorf("%.40q is no rate: want bits per second, such as 20M, 1.5Gi or 64000, or none", text)
	}
	if !rate.IsUint64() || rate.Uint64() < minRate || rate.Uint64() > maxRate {
		return 0, fmt.Errorf("rate %s: want 1k to 100G bits per second, or none", text)
	}
	return rate.Uint64(), nil
}
