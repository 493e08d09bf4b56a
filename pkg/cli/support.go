// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/child"
	"github.com/podlace/podlace/pkg/cli/doctor"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

const supportHelp = `Collect the facts that a developer needs to analyse a problem of this node into one
archive: versions, findings of doctor, network configurations, records and leases,
links, addresses, routes, rules, qdiscs and the log lines of the last hour that name
Podlace.

The command first lists the contents and asks before it writes. It leaves out values
that look like a secret or whose key does (token, password, key, certificate), and every
file that is no network configuration. The archive contains names of pods and addresses.`

const supportExample = `  podlace support-bundle
  podlace support-bundle --yes --file /tmp/node7.tar.gz`

type bundleFile struct {
	name string
	data []byte
}

func newSupportBundle() *cobra.Command {
	var file string
	var yes bool
	cmd := &cobra.Command{
		Use:     "support-bundle",
		Short:   "Collect the facts that a developer needs to analyse a problem of this node",
		Long:    supportHelp,
		Example: supportExample,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if file == "" {
				host, _ := os.Hostname()
				file = fmt.Sprintf("podlace-%s-%s.tar.gz", filepath.Base(host), time.Now().UTC().Format("20060102-150405"))
			}
			return supportBundle(cmd.InOrStdin(), cmd.OutOrStdout(), file, yes)
		},
	}
	cmd.Flags().StringVar(&file, "file", "", "archive to write (default: podlace-HOST-TIME.tar.gz)")
	cmd.Flags().BoolVar(&yes, "yes", false, "write without asking")
	return cmd
}

func supportBundle(stdin io.Reader, stdout io.Writer, file string, yes bool) error {
	if _, err := os.Lstat(file); err == nil {
		return fmt.Errorf("--file %s: the file exists", file)
	}
	all := collectBundle()
	total := 0
	for _, b := range all {
		fmt.Fprintf(stdout, "%9d  %s\n", len(b.data), plain(b.name))
		total += len(b.data)
	}
	if !yes {
		fmt.Fprintf(stdout, "write these %d files, %d bytes before compression, to %s? [y/N] ", len(all), total, file)
		answer, _ := bufio.NewReader(stdin).ReadString('\n')
		if !isYes(answer) {
			fmt.Fprintln(stdout, "nothing is written")
			return nil
		}
	}
	if err := writeBundle(file, all); err != nil {
		return err
	}
	_, err := fmt.Fprintf(stdout, "written: %s, which only root can read\n", file)
	return err
}

func writeBundle(file string, all []bundleFile) (err error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			os.Remove(file)
		}
	}()
	compressed := gzip.NewWriter(f)
	archive := tar.NewWriter(compressed)
	for _, b := range all {
		head := tar.Header{Name: "podlace-support/" + b.name, Mode: 0o600, Size: int64(len(b.data)), ModTime: time.Now(), Format: tar.FormatPAX}
		if err := archive.WriteHeader(&head); err != nil {
			return err
		}
		if _, err := archive.Write(b.data); err != nil {
			return err
		}
	}
	return errors.Join(archive.Close(), compressed.Close())
}

// collectBundle reads all files for the support archive. For one that cannot be read, the archive has the error.
func collectBundle() (all []bundleFile) {
	add := func(name string, data []byte, err error) {
		if err != nil {
			data = append(data, []byte("\nerror: "+err.Error()+"\n")...)
		}
		all = append(all, bundleFile{name, data})
	}
	asJSON := func(name string, v any, err error) {
		data, e := json.MarshalIndent(v, "", "  ")
		add(name, data, errors.Join(err, e))
	}
	asJSON("version.json", thisBuild(), nil)
	found, err := doctor.Examine(doctor.Options{})
	asJSON("doctor.json", found, err)
	folders := doctor.Folders(doctor.Options{})
	networks, notes, err := reconcile.Networks(folders.ConfDir)
	for _, n := range networks {
		add("conf/"+filepath.Base(n.File), redact(n.Text), nil)
	}
	asJSON("conf/notes.json", notes, err)
	list, err := reconcile.List(networks)
	asJSON("attachments.json", list, err)
	for _, name := range filesBelow(store.Root) {
		data, err := store.ReadFile(name)
		add("state"+strings.TrimPrefix(name, store.Root), redact(data), err)
	}
	for _, c := range bundleCommands() {
		data, err := outputOf(c...)
		add("commands/"+strings.ReplaceAll(strings.Join(c, "_"), "/", "-")+".txt", data, err)
	}
	return all
}

// bundleCommands returns the programs that print the kernel's state and the log.
func bundleCommands() [][]string {
	return [][]string{
		{"uname", "-a"}, {"ip", "-d", "-s", "link"}, {"ip", "addr"}, {"ip", "route", "show", "table", "all"},
		{"ip", "-6", "route", "show", "table", "all"},
		{"ip", "rule"}, {"ip", "nexthop"}, {"ip", "neigh"}, {"bridge", "-d", "link"}, {"bridge", "fdb"}, {"bridge", "vlan"},
		{"tc", "-s", "qdisc"},
		{"nft", "list", "ruleset"}, {"sysctl", "-a", "-r", "^net\\.(ipv4|ipv6)\\.(ip_forward|conf)|nf_conntrack_(count|max)|bridge-nf|gc_thresh"},
		{"journalctl", "--since", "-1h", "--no-pager", "-g", "podlace"},
	}
}

// maxFiles limits the archived files of the state folder, which has about two for each attachment.
const maxFiles = 10000

func filesBelow(dir string) (names []string) {
	_ = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type().IsRegular() && len(names) < maxFiles {
			names = append(names, path)
		}
		return nil
	})
	return names
}

const commandTimeout = 20 * time.Second

// outputOf runs a program and returns its output, or a text that says that it is not installed.
func outputOf(command ...string) ([]byte, error) {
	path, err := exec.LookPath(command[0])
	if err != nil {
		return []byte(err.Error() + "\n"), nil
	}
	var out child.Buffer
	cmd := exec.Command(path, command[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &out
	err = child.Run(cmd, commandTimeout, nil)
	return []byte(hideSecrets(out.String())), err
}

// hideSecrets replaces what looks like a secret in a text: values after a word such as token, passwords in URLs, private keys in PEM, JSON
// web tokens, and the tokens of GitHub, GitLab and AWS.
func hideSecrets(text string) string {
	text = secretValue.ReplaceAllString(text, "left out")
	return secretText.ReplaceAllString(secretURL.ReplaceAllString(text, "${1}left out@"), "${1}left out")
}

var (
	secretValue = regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)|eyJ[\w-]+\.[\w-]+\.[\w-]+|` +
		`\bgh[a-z]_\w{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}|\bA[KS]IA[0-9A-Z]{16}\b`)
	secretURL = regexp.MustCompile(`(://[^\s/:@]*:)[^\s/@]+@`)
)

// secretWords are parts of keys whose values are secrets, and secretEnds the ends of such keys, in any case or in camel case.
const (
	secretWords = `(?i:token|passw|passphrase|pwd|psk|secret|credential|private|authorization)`
	secretEnds  = `(?:(?i:(?:api|access|client)(?:key|cert)|[_-](?:key|cert|ca))|[a-z](?:Key|Cert|CA|Ca))(?i:data)?`
)

// secretText matches values that look like secrets in the output of programs, such as net.ipv6.conf.eth0.stable_secret (RFC 7217).
var secretText = regexp.MustCompile(`((?:` + secretWords + `[\w-]*|` + secretEnds +
	`)["']?[ \t]*[=:][ \t]*["']?(?i:(?:bearer|basic|token)[ \t]+)?)[^\s"']+`)

// secretKey matches the JSON keys whose values must not be archived.
var secretKey = regexp.MustCompile(secretWords + `|(?i:certificate|kubeconfig|(?:^|[^a-z])(?:key|cert|ca)(?:data)?$)|` + secretEnds + `$`)

// redact replaces the secrets in a JSON text, or the whole text if it is none.
func redact(data []byte) []byte {
	var v any
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	if len(bytes.TrimSpace(data)) == 0 {
		return data
	}
	if decoder.Decode(&v) != nil {
		return []byte(plugin.Plain(fmt.Sprintf("left out: %d bytes that are not JSON\n", len(data)), maxEvidence))
	}
	text, _ := json.MarshalIndent(withoutSecrets(v), "", "  ") // what was decoded can be encoded
	return text
}

func withoutSecrets(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			if secretKey.MatchString(key) {
				v[key] = "left out"
			} else {
				v[key] = withoutSecrets(value)
			}
		}
	case []any:
		for i := range v {
			v[i] = withoutSecrets(v[i])
		}
	case string:
		return hideSecrets(v)
	}
	return v
}
